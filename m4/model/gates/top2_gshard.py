"""GShard's gate: top-2 with capacity, local groups, auxiliary loss and a random second expert.

Source: GShard (arXiv 2006.16668), Algorithm 1; its lines are cited below. Where the paper and
Lingvo (gshard_layers.py, Top2GatingOnLogits, what the M4 team ran) differ, an argument decides.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model.routing import (
    Array,
    Capacity,
    Routing,
    Tokens,
    assign_positions,
    balance_loss,
    make_routing,
    top_k,
)
from m4.settings import OneOf, SettingError, checked

POLICIES = ("random", "all", "sampling", "none")


@checked
def top2_gshard(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    second_policy: Annotated[str, OneOf(POLICIES)] = "random",
    eval_second_policy: Annotated[str, OneOf(("all", "none"))] = "all",
    paper_slot: bool = False,
    normalize: Annotated[str, OneOf(("before", "after"))] = "before",
    real_token_means: bool = True,
    paper_scale: bool = False,
) -> Routing:
    """Routes each token to its best expert and, by chance, to its second best.

    Args:
        tokens: see `Tokens`; the router matrix is `score("router")`.
        num_experts: E. capacity: see `Capacity`; asked for two choices.
        second_policy: in training: "random" (accept iff 2 g2 > U(0,1)), "all", "sampling" (the
            second expert is drawn from the softmax of the others, NLLB's default) or "none".
        eval_second_policy: the same outside training: "all" or "none".
        paper_slot: True as the paper's line 22: a second expert refused by the coin still uses up a
            slot. False as Lingvo: it does not.
        normalize: "before": the gates are divided by g1 + g2 and the survivor of a dropped pair
            keeps its share (paper line 6, Lingvo legacy). "after": the coin sees the raw g2 and
            the survivors are renormalised (Lingvo non-legacy).
        real_token_means: the auxiliary loss averages over real tokens; False divides by S, padding
            included (paper and Lingvo legacy).
        paper_scale: the auxiliary loss as the paper's line 13; False: times E^2, 1 when balanced.

    Raises:
        SettingError: fewer than two experts; a random policy in training without random numbers.
    """
    if num_experts < 2:
        raise SettingError("MoeLayer.num_experts", num_experts, "at least 2 for top2_gshard")
    policy = second_policy if tokens.train else eval_second_policy
    logits_GSE = tokens.score("router")
    uniform = None
    if policy in ("random", "sampling"):
        if tokens.rng is None:
            allowed = "'all' or 'none' in training without random numbers (rngs={'dropout': key})"
            raise SettingError("top2_gshard.second_policy", second_policy, allowed)
        shape = logits_GSE.shape if policy == "sampling" else logits_GSE.shape[:2]
        # Never 0: its logarithm is taken twice.
        uniform = jax.random.uniform(tokens.rng, shape, minval=jnp.finfo(jnp.float32).tiny)
    return route(
        logits_GSE,
        tokens.mask_GS,
        uniform,
        num_experts,
        capacity(2),
        policy=policy,
        paper_slot=paper_slot,
        normalize=normalize,
        real_token_means=real_token_means,
        paper_scale=paper_scale,
    )


def route(
    logits_GSE: Array,
    mask_GS: Array,
    uniform: Array | None,
    num_experts: int,
    capacity: int,
    *,
    policy: str,
    paper_slot: bool,
    normalize: str,
    real_token_means: bool,
    paper_scale: bool = False,
) -> Routing:
    """Algorithm 1 for given logits, C and random numbers in (0, 1): [G, S], the coin throws of
    policy "random", or [G, S, E], which policy "sampling" draws the second expert with."""
    probs_GSE = jax.nn.softmax(logits_GSE)  # line 4
    # By logits: where probabilities underflow to 0 the first expert could be chosen twice.
    drawn_GSE = _drawn(logits_GSE, uniform) if policy == "sampling" else logits_GSE
    _, expert_GSK = top_k(drawn_GSE, 2)
    p1_GS, p2_GS = (_probability(probs_GSE, expert_GSK[..., k]) for k in (0, 1))
    both_GS = p1_GS + p2_GS + 1e-9
    g1_GS, g2_GS = p1_GS / both_GS, p2_GS / both_GS  # line 6
    coin_GS = jnp.full(mask_GS.shape, policy != "none")
    if policy == "random":  # line 20
        assert uniform is not None
        coin_GS = 2.0 * (g2_GS if normalize == "before" else p2_GS) > uniform
    accepted_GSK = jnp.stack([mask_GS, mask_GS & coin_GS], axis=-1)
    both_GSK = jnp.stack([mask_GS, mask_GS], axis=-1)
    # Lines 7-23: all first choices in token order, then all second ones. Full experts continue to
    # count, and by line 22 so does a second choice that the coin refuses.
    asks_GSK = both_GSK if paper_slot else accepted_GSK
    position_GSK = assign_positions(expert_GSK, asks_GSK, num_experts, capacity)
    position_GSK = jnp.where(accepted_GSK, position_GSK, -1)
    if normalize == "after":
        p1_GS, p2_GS = p1_GS * (position_GSK[..., 0] >= 0), p2_GS * (position_GSK[..., 1] >= 0)
        total_GS = p1_GS + p2_GS
        safe_GS = jnp.where(total_GS > 0, total_GS, 1.0)
        g1_GS, g2_GS = p1_GS / safe_GS, p2_GS / safe_GS
    # Line 13: first choices before capacity.
    means = {"real_token_means": real_token_means, "paper_scale": paper_scale}
    aux_loss = balance_loss(probs_GSE, expert_GSK[..., :1], mask_GS, **means)
    return make_routing(
        *(expert_GSK, position_GSK, jnp.stack([g1_GS, g2_GS], -1), mask_GS, num_experts, capacity),
        ranked_GSK=accepted_GSK,
        logits_GSE=logits_GSE,
        aux_loss=aux_loss,
    )


def _probability(probs_GSE: Array, expert_GS: Array) -> Array:
    return jnp.sum(probs_GSE * jax.nn.one_hot(expert_GS, probs_GSE.shape[-1], dtype=bool), axis=-1)


def _drawn(logits_GSE: Array, uniform_GSE: Array | None) -> Array:
    """Scores of which the largest is the first expert's and the second largest that of an expert
    drawn from the softmax of the others, by Gumbel's trick (Lingvo 2139-2160)."""
    assert uniform_GSE is not None
    first_GS = jnp.argmax(logits_GSE, axis=-1)
    is_first_GSE = jax.nn.one_hot(first_GS, logits_GSE.shape[-1], dtype=bool)
    return jnp.where(is_first_GSE, jnp.inf, logits_GSE - jnp.log(-jnp.log(uniform_GSE)))

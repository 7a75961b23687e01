"""GShard's gate: top-2 with capacity, local groups, auxiliary loss and a random second expert.

Source: GShard (arXiv 2006.16668), Algorithm 1; its lines are cited below. Where the paper and
Lingvo (gshard_layers.py, Top2GatingOnLogits, what the M4 team ran) differ, an argument decides.
"""

from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model.routing import (
    Array,
    Capacity,
    Routing,
    Tokens,
    at_experts,
    balance_loss,
    plan_choices,
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
        second_policy: The second expert in training: "random" (accepted iff 2 g2 > U(0,1)), "all",
            "sampling" (drawn from the softmax of the others, NLLB's default) or "none".
        eval_second_policy: The second expert outside training: "all" or "none".
        paper_slot: A second expert that the coin refuses still uses up a slot, as in the paper's
            line 22. In Lingvo it does not.
        normalize: "before": the gates are divided by g1 + g2 and the survivor of a dropped pair
            keeps its share (paper line 6, Lingvo legacy). "after": the coin sees the raw g2 and
            the survivors are renormalised (Lingvo non-legacy).
        real_token_means: The auxiliary loss averages over real tokens and the groups that have any;
            False divides by S and by all groups, padding included (paper and Lingvo legacy).
        paper_scale: The auxiliary loss is that of the paper's line 13; False is E^2 times that, 1
            when balanced.

    Raises:
        SettingError: There is one expert, or no random numbers for a policy that draws.
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
        # Above 0, because its logarithm is taken twice.
        uniform = jax.random.uniform(tokens.rng, shape, minval=jnp.finfo(jnp.float32).tiny)
    plan = capacity(2), policy, paper_slot, normalize, real_token_means, paper_scale
    return route(logits_GSE, tokens.mask_GS, uniform, num_experts, *plan)


def route(
    logits_GSE: Array,
    mask_GS: Array,
    uniform: Array | None,
    num_experts: int,
    capacity: int,
    policy: str,
    paper_slot: bool,
    normalize: str,
    real_token_means: bool,
    paper_scale: bool = False,
) -> Routing:
    """Applies Algorithm 1 to given logits and random numbers; options are those of `top2_gshard`.

    `uniform` is in (0, 1): [G, S] for the coin of policy "random", or [G, S, E] for the draw of
    policy "sampling".
    """
    probs_GSE = jax.nn.softmax(logits_GSE)  # line 4
    # By logits: where probabilities underflow to 0, the first expert could be chosen twice.
    drawn_GSE = _drawn(logits_GSE, uniform) if policy == "sampling" else logits_GSE
    _, expert_GSK = top_k(drawn_GSE, 2)
    # One after the other, as in the paper: the gradient of a sum over K rounds differently.
    p1_GS, p2_GS = (at_experts(probs_GSE, expert_GSK[..., k, None])[..., 0] for k in (0, 1))
    both_GS = p1_GS + p2_GS + 1e-9
    g_GSK = jnp.stack([p1_GS / both_GS, p2_GS / both_GS], axis=-1)  # line 6
    p_GSK = jnp.stack([p1_GS, p2_GS], axis=-1)
    second_GS = jnp.full(mask_GS.shape, policy != "none")
    if policy == "random":  # line 20
        assert uniform is not None
        second_GS = 2.0 * (g_GSK if normalize == "before" else p_GSK)[..., 1] > uniform
    # Lines 7-23: all first choices in token order, then all second ones. Choices of full experts
    # are counted too, and by line 22 so is a second choice that the coin refuses.
    scale: dict[str, bool] = {"real_token_means": real_token_means, "paper_scale": paper_scale}
    plan = plan_choices(
        *(expert_GSK, g_GSK, mask_GS, num_experts, capacity),
        wants_GSK=jnp.stack([mask_GS, second_GS], axis=-1),
        unwanted_use_slots=paper_slot,
        logits_GSE=logits_GSE,
        # Line 13: first choices before capacity.
        aux_loss=balance_loss(probs_GSE, expert_GSK[..., :1], mask_GS, **scale),
    )
    if normalize == "before":
        return plan
    # The choices with a slot share a weight of 1 by p.
    p_GSK = p_GSK * (plan.position_GSK >= 0)
    total_GS1 = jnp.sum(p_GSK, axis=-1, keepdims=True)
    return replace(plan, weight_GSK=p_GSK / jnp.where(total_GS1 > 0, total_GS1, 1.0))


def _drawn(logits_GSE: Array, uniform_GSE: Array | None) -> Array:
    # The second is drawn from the softmax of the others, by the Gumbel trick (Lingvo 2139-2160).
    assert uniform_GSE is not None
    first_GS = jnp.argmax(logits_GSE, axis=-1)
    is_first_GSE = jax.nn.one_hot(first_GS, logits_GSE.shape[-1], dtype=bool)
    return jnp.where(is_first_GSE, jnp.inf, logits_GSE - jnp.log(-jnp.log(uniform_GSE)))

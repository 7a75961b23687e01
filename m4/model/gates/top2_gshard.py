"""GShard's gate: top-2 with capacity, local groups, auxiliary loss and a random second expert.

Source: GShard (arXiv 2006.16668), Algorithm 1; its lines are cited below. Where the paper and
Lingvo (gshard_layers.py, Top2GatingOnLogits, what the M4 team ran) differ, an argument decides.
"""

import jax
import jax.numpy as jnp

from m4.model.routing import Array, Routing, Tokens, masked_mean, take_seats

POLICIES = ("random", "all", "none")


def top2_gshard(
    tokens: Tokens,
    num_experts: int,
    capacity: int,
    *,
    second_policy: str = "random",
    eval_second_policy: str = "all",
    paper_seat: bool = False,
    normalize: str = "before",
    real_token_means: bool = True,
) -> Routing:
    """Routes each token to its best expert and, by chance, to its second best.

    Args:
        tokens: see `Tokens`; the router matrix is `score("router")`.
        num_experts: E. capacity: C, seats a (group, expert).
        second_policy: in training, "random" (accept iff 2 g2 > U(0,1)), "all" or "none".
        eval_second_policy: the same elsewhere: "all" is deterministic.
        paper_seat: True as the paper's line 22: a second expert refused by the coin still uses up a
            seat. False as Lingvo: it does not.
        normalize: "before": the gates are divided by g1 + g2 and the survivor of a dropped pair
            keeps its share (paper line 6, Lingvo legacy). "after": the coin sees the raw g2 and
            the survivors are renormalised (Lingvo non-legacy).
        real_token_means: the auxiliary loss averages over real tokens; False divides by S, padding
            included (paper and Lingvo legacy).

    Raises:
        ValueError: an unknown policy or normalisation.
    """
    policy = second_policy if tokens.train and tokens.rng is not None else eval_second_policy
    if policy not in POLICIES:
        raise ValueError(f"top2_gshard.top2_gshard.second_policy: {policy!r} is none of {POLICIES}")
    logits_GSE = tokens.score("router")
    uniform_GS = None
    if policy == "random":
        assert tokens.rng is not None
        uniform_GS = jax.random.uniform(tokens.rng, logits_GSE.shape[:2])
    return route(
        logits_GSE,
        tokens.mask_GS,
        uniform_GS,
        num_experts,
        capacity,
        policy=policy,
        paper_seat=paper_seat,
        normalize=normalize,
        real_token_means=real_token_means,
    )


def route(
    logits_GSE: Array,
    mask_GS: Array,
    uniform_GS: Array | None,
    num_experts: int,
    capacity: int,
    *,
    policy: str,
    paper_seat: bool,
    normalize: str,
    real_token_means: bool,
) -> Routing:
    """Algorithm 1 for given logits and given coin throws uniform_GS (needed by "random")."""
    if normalize not in ("before", "after"):
        raise ValueError(
            f"top2_gshard.top2_gshard.normalize: {normalize!r} is none of before, after"
        )
    logits_GSE = logits_GSE.astype(jnp.float32)
    probs_GSE = jax.nn.softmax(logits_GSE)  # line 4
    # Ties go to the lowest index (argmax). The second choice is taken from the logits, not from
    # the probabilities: where those underflow to 0 the first expert could be chosen twice.
    first_GS = jnp.argmax(logits_GSE, axis=-1)
    is_first_GSE = jax.nn.one_hot(first_GS, num_experts, dtype=bool)
    second_GS = jnp.argmax(jnp.where(is_first_GSE, -jnp.inf, logits_GSE), axis=-1)
    is_second_GSE = jax.nn.one_hot(second_GS, num_experts, dtype=bool)
    p1_GS = jnp.sum(probs_GSE * is_first_GSE, axis=-1)
    p2_GS = jnp.sum(probs_GSE * is_second_GSE, axis=-1)
    both_GS = p1_GS + p2_GS + 1e-9
    g1_GS, g2_GS = p1_GS / both_GS, p2_GS / both_GS  # line 6

    # Lines 7-12: all first choices, in token order. Full experts go on counting.
    nobody_GE = jnp.zeros((logits_GSE.shape[0], num_experts), jnp.int32)
    seat1_GS, count1_GE = take_seats(first_GS, mask_GS, nobody_GE, num_experts)
    has1_GS = mask_GS & (seat1_GS < capacity)

    # Line 13, times E^2: 1 when balanced. First choices before capacity; groups apart, then mean.
    group_tokens = logits_GSE.shape[1]
    real_G1 = jnp.sum(mask_GS, axis=1, keepdims=True).astype(jnp.float32)
    denominator = jnp.maximum(real_G1, 1.0) if real_token_means else float(group_tokens)
    share_GE = count1_GE / denominator
    mean_GE = jnp.sum(probs_GSE * mask_GS[..., None], axis=1) / denominator
    loss_G = num_experts * jnp.sum(share_GE * mean_GE, axis=-1)
    # A group of padding alone has no balance to speak of.
    aux_loss = masked_mean(loss_G, real_G1[:, 0] > 0) if real_token_means else jnp.mean(loss_G)

    # Lines 14-23: all second choices, after all first ones.
    if policy == "random":
        assert uniform_GS is not None
        coin_GS = 2.0 * (g2_GS if normalize == "before" else p2_GS) > uniform_GS  # line 20
    else:
        coin_GS = jnp.full(mask_GS.shape, policy == "all")
    asks_GS = mask_GS if paper_seat else mask_GS & coin_GS  # line 22 counts everyone
    # Seats of full experts are not carried over: the first pass took at most C of them.
    seat2_GS, _ = take_seats(second_GS, asks_GS, jnp.minimum(count1_GE, capacity), num_experts)
    has2_GS = asks_GS & coin_GS & (seat2_GS < capacity)

    g1_GS, g2_GS = (
        (g1_GS * has1_GS, g2_GS * has2_GS)
        if normalize == "before"
        else _renormalize(p1_GS * has1_GS, p2_GS * has2_GS)
    )
    has_GSK = jnp.stack([has1_GS, has2_GS], axis=-1)
    seat_GSK = jnp.stack([seat1_GS, seat2_GS], axis=-1)
    return Routing(
        expert_GSK=jnp.stack([first_GS, second_GS], axis=-1).astype(jnp.int32),
        seat_GSK=jnp.where(has_GSK, seat_GSK, -1),
        weight_GSK=jnp.stack([g1_GS, g2_GS], axis=-1),
        aux_loss=aux_loss,
        z_loss=masked_mean(jnp.square(jax.nn.logsumexp(logits_GSE, axis=-1)), mask_GS),
        num_experts=num_experts,
        capacity=capacity,
        metrics={
            # Shares of the real tokens.
            "first_overflow": masked_mean(~has1_GS, mask_GS),
            "second_dropped": masked_mean(~has2_GS, mask_GS),
            "nowhere": masked_mean(~(has1_GS | has2_GS), mask_GS),
            "router_entropy": masked_mean(
                -jnp.sum(probs_GSE * jax.nn.log_softmax(logits_GSE), axis=-1), mask_GS
            ),
            "load_E": count1_GE.sum(axis=0) / jnp.maximum(jnp.sum(mask_GS), 1),
        },
    )


def _renormalize(g1_GS: Array, g2_GS: Array) -> tuple[Array, Array]:
    """Divides by the survivors' sum; 0/0 is 0."""
    total_GS = g1_GS + g2_GS
    safe_GS = jnp.where(total_GS > 0, total_GS, 1.0)
    return g1_GS / safe_GS, g2_GS / safe_GS

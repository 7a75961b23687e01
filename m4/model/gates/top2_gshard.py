"""GShard's gate: top-2 with capacity, local groups, auxiliary loss and a random second expert.

Source: GShard (arXiv 2006.16668), Algorithm 1; its lines are cited below. Where the paper and
Lingvo (gshard_layers.py, Top2GatingOnLogits, used by the M4 team) differ, an argument decides.
"""

from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model import routing
from m4.model.routing import Array, Capacity, Routing, Tokens, at_experts, balance_loss
from m4.settings import OneOf, SettingError, checked


@checked
def top2_gshard(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    second_policy: Annotated[str, OneOf(("random", "all", "sampling", "none"))] = "random",
    paper_slot: bool = False,
    normalize: Annotated[str, OneOf(("before", "after"))] = "before",
    real_token_means: bool = True,
    paper_scale: bool = False,
) -> Routing:
    """Routes each token to its best expert and, by chance, to its second best.

    Args:
        second_policy: The second expert in training: "random" (accepted iff 2 g2 > U(0,1)), "all",
            "sampling" (drawn from the softmax of the others, NLLB's default) or "none". Outside
            training, all are accepted.
        paper_slot: Whether a second expert that the coin refuses still uses up a slot, as in the
            paper's line 22, but not in Lingvo.
        normalize: "before": the gates are divided by g1 + g2 and the survivor of a dropped pair
            keeps its share (paper line 6, Lingvo legacy). "after": the coin sees the raw g2 and
            the survivors are renormalised (Lingvo non-legacy).
        real_token_means: Whether the auxiliary loss averages over real tokens and the groups that
            have any; False divides by S and all groups, with padding (paper and Lingvo legacy).
        paper_scale: Whether the auxiliary loss is that of the paper's line 13; False is E^2 times
            that, 1 when balanced.

    Raises:
        SettingError: There is one expert, or no random numbers for a policy that draws.
    """
    if num_experts < 2:
        raise SettingError("MoeLayer.num_experts", num_experts, "at least 2 for top2_gshard")
    policy = second_policy if tokens.train else "all"
    logits_GSE, mask_GS = tokens.score("router"), tokens.mask_GS

    def draw(shape: tuple[int, ...]) -> Array:
        if tokens.rng is None:
            allowed = "'all' or 'none' in training without random numbers (rngs={'dropout': key})"
            raise SettingError("top2_gshard.second_policy", second_policy, allowed)
        # Above 0, because its logarithm is taken twice.
        return jax.random.uniform(tokens.rng, shape, minval=jnp.finfo(jnp.float32).tiny)

    probs_GSE = jax.nn.softmax(logits_GSE)  # line 4
    # By logits: if probabilities underflow to 0, the first expert could be chosen twice.
    drawn_GSE = logits_GSE
    if policy == "sampling":
        # The second is drawn from the softmax of the others, by the Gumbel trick (Lingvo).
        first_GS = jnp.argmax(logits_GSE, axis=-1)
        is_first_GSE = jax.nn.one_hot(first_GS, logits_GSE.shape[-1], dtype=bool)
        drawn_GSE = logits_GSE - jnp.log(-jnp.log(draw(logits_GSE.shape)))
        drawn_GSE = jnp.where(is_first_GSE, jnp.inf, drawn_GSE)
    _, expert_GSK = routing.top_k(drawn_GSE, 2)
    # Added one by one, as in the paper: the gradient of a sum over K is rounded differently.
    p1_GS, p2_GS = (at_experts(probs_GSE, expert_GSK[..., k, None])[..., 0] for k in (0, 1))
    both_GS = p1_GS + p2_GS + 1e-9
    g_GSK = jnp.stack([p1_GS / both_GS, p2_GS / both_GS], axis=-1)  # line 6
    p_GSK = jnp.stack([p1_GS, p2_GS], axis=-1)
    second_GS = jnp.full(mask_GS.shape, policy != "none")
    if policy == "random":  # line 20
        second_GS = 2.0 * (g_GSK if normalize == "before" else p_GSK)[..., 1] > draw(mask_GS.shape)
    # Lines 7-23: all first choices in token order, then all second ones. Choices of full experts
    # are counted too, and by line 22 so is a second choice that the coin refuses.
    scale = {"real_token_means": real_token_means, "paper_scale": paper_scale}
    plan = routing.plan_choices(
        *(expert_GSK, g_GSK, mask_GS, num_experts, capacity(2)),
        wants_GSK=jnp.stack([mask_GS, second_GS], axis=-1),
        unwanted_use_slots=paper_slot,
        logits_GSE=logits_GSE,
        # Line 13: first choices before capacity.
        aux_loss=balance_loss(probs_GSE, expert_GSK[..., :1], mask_GS, **scale),
    )
    if normalize == "before":
        return plan
    # The choices with a slot share the weight 1 in proportion to p.
    p_GSK = p_GSK * (plan.position_GSK >= 0)
    total_GS1 = jnp.sum(p_GSK, axis=-1, keepdims=True)
    return replace(plan, weight_GSK=p_GSK / jnp.where(total_GS1 > 0, total_GS1, 1.0))

"""DeepSeek's gates: a bias balances the load, and a token uses experts of only a few groups.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), the bias of Wang et al. 2024 (arXiv
2408.15664), DeepSeek-V2 (arXiv 2405.04434, section 2.1.2).
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model import routing
from m4.model.routing import Capacity, Routing, Tokens, at_experts, balance_loss, top_k
from m4.settings import Factor, OneOf, Rate, SettingError, Size, checked


@checked
def deepseek(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    choices: Size = 2,
    scores: Annotated[str, OneOf(("sigmoid", "softmax"))] = "sigmoid",
    normalize: bool = True,
    route_scale: Factor = 1.0,
    bias_rate: Rate = 1e-3,
    expert_groups: Size = 1,
    best_groups: Size = 1,
) -> Routing:
    """Routes each token to the k largest s + b, with weights s divided by the sum of the k.

    s are scores of the logits. The bias b starts at 0 and has no gradient: after a training step,
    b_e += bias_rate * sign(mean load - load_e), where the load is the number of choices of an
    expert in the whole batch, before capacity (`m4.model.moe.move_biases`). b is the parameter
    `bias/table`, and is fixed in evaluation. Ties go to the lowest index.

    The auxiliary loss is `balance_loss`, where P is s over its sum. (V3 computes it for each
    sequence, with a factor of 1e-4: `Training.aux_loss_factor`.) The z-loss is 0 for sigmoid
    scores, which a sum of exponentials does not describe.

    V3 is choices=8, expert_groups=8, best_groups=4, route_scale=2.5; V2 is choices=6,
    scores="softmax", normalize=False, bias_rate=0, expert_groups=8, best_groups=3, route_scale=16.

    Args:
        choices: Number of experts per token, k.
        bias_rate: Step size of the bias.
        route_scale: Factor of the weights.
        scores: "sigmoid" (V3) or "softmax" over all experts (V2).
        normalize: Whether to divide the weights by their sum; otherwise they are s.
        expert_groups: Number of groups of consecutive experts.
        best_groups: Number of groups that a token may choose from: those with the largest sum of
            two s + b, or, for softmax scores, with the largest one.

    Raises:
        SettingError: The groups do not divide the experts, or have fewer than the choices.
    """
    if num_experts % expert_groups:
        allowed = f"a divisor of {num_experts} experts"
        raise SettingError("deepseek.expert_groups", expert_groups, allowed)
    members = num_experts // expert_groups
    if best_groups > expert_groups:
        allowed = f"at most deepseek.expert_groups = {expert_groups}"
        raise SettingError("deepseek.best_groups", best_groups, allowed)
    routing.check_choices("deepseek.choices", choices, best_groups * members)
    assert tokens.bias is not None
    sigmoid = scores == "sigmoid"
    logits_GSE = tokens.score("router")
    # Sums and quotients of tiny scores are computed as logarithms.
    log_GSE = jax.nn.log_sigmoid(logits_GSE) if sigmoid else jax.nn.log_softmax(logits_GSE)
    score_GSE = jnp.exp(log_GSE)
    biased_GSE = jax.lax.stop_gradient(score_GSE) + tokens.bias()[None, None]
    if best_groups < expert_groups:
        in_group_GSDN = biased_GSE.reshape(*biased_GSE.shape[:2], -1, members)
        largest_GSDB = top_k(in_group_GSDN, min(2 if sigmoid else 1, members))[0]
        best_GSB = top_k(jnp.sum(largest_GSDB, axis=-1), best_groups)[1]
        group_E = (jnp.arange(num_experts) // members)[None, None, None]
        is_in_GSE = jnp.any(best_GSB[..., None] == group_E, axis=2)
        biased_GSE = jnp.where(is_in_GSE, biased_GSE, -jnp.inf)
    expert_GSK = top_k(biased_GSE, choices)[1]
    if normalize:
        weight_GSK = jax.nn.softmax(at_experts(log_GSE, expert_GSK))
    else:
        weight_GSK = at_experts(score_GSE, expert_GSK)
    share_GSE = jax.nn.softmax(log_GSE)
    chosen_GSKE = jax.nn.one_hot(expert_GSK, num_experts) * tokens.mask_GS[..., None, None]
    weights = weight_GSK * route_scale, tokens.mask_GS
    plan = routing.plan_choices(
        *(expert_GSK, *weights, num_experts, capacity(choices)),
        logits_GSE=None if sigmoid else logits_GSE,
        aux_loss=balance_loss(share_GSE, expert_GSK, tokens.mask_GS),
    )
    load_E = jnp.sum(chosen_GSKE, axis=(0, 1, 2))
    return dataclasses.replace(plan, bias_load_E=load_E, bias_rate=bias_rate)

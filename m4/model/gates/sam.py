"""SAM (Switch and Mixture), hierarchical top-k: the best group of experts, and its k best ones.

Source: "Towards More Effective and Economic Sparsely-Activated Model" (arXiv 2110.07431), section
3, and HetuMoE's SAMGate.py. With one group per device, all experts of a token are in one place.
"""

import jax
import jax.numpy as jnp

from m4.model import routing
from m4.model.routing import Capacity, Routing, Tokens, at_experts, balance_loss, plan_choices
from m4.settings import Factor, SettingError, Size, checked


@checked
def sam(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    choices: Size = 2,
    expert_groups: Size = 2,
    alignment: Factor = 1.0,
) -> Routing:
    """Routes each token to the k best experts of the group with the largest sum of p.

    p is one softmax over all E; a group of experts is E/D consecutive ones. Ties go to the lowest
    index of groups and of experts (HetuMoE takes the last of equal groups). The weights are p, not
    normalised. Slots go to all first choices in token order, then to all second ones.

    The auxiliary loss is `balance_loss` + alignment * misfit. The misfit is the mean over real
    tokens of the sum over experts outside the chosen group of relu(p - p of the k-th choice): by
    how much the group keeps a token from better experts.

    Args:
        choices: Number of experts per token, k.
        expert_groups: Number of groups of experts, D.
        alignment: Factor of the misfit. (HetuMoE's balance is k times as large, and its misfit is
            summed over tokens.)

    Raises:
        SettingError: D does not divide E, or a group has fewer experts than the choices.
    """
    if num_experts % expert_groups:
        raise SettingError("sam.expert_groups", expert_groups, f"a divisor of {num_experts}")
    members = num_experts // expert_groups
    routing.check_choices("sam.choices", choices, members)
    logits_GSE = tokens.score("router")
    mask_GS = tokens.mask_GS
    probs_GSE = jax.nn.softmax(logits_GSE)
    G, S, E = probs_GSE.shape
    best_GS = jnp.argmax(probs_GSE.reshape(G, S, -1, members).sum(axis=-1), axis=-1)
    inside_GSE = (jnp.arange(E) // members)[None, None, :] == best_GS[..., None]
    _, expert_GSK = routing.top_k(jnp.where(inside_GSE, logits_GSE, -jnp.inf), choices)
    weight_GSK = at_experts(probs_GSE, expert_GSK)
    balance = balance_loss(probs_GSE, expert_GSK, mask_GS)
    above_GSE = jax.nn.relu(probs_GSE - weight_GSK[..., -1:])
    misfit = routing.masked_mean(jnp.sum(jnp.where(inside_GSE, 0.0, above_GSE), axis=-1), mask_GS)
    return plan_choices(
        *(expert_GSK, weight_GSK, mask_GS, num_experts, capacity(choices)),
        logits_GSE=logits_GSE,
        aux_loss=balance + alignment * misfit,
    )

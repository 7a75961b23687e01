"""Mixtral's gate: the k best experts, weighted with the softmax of their logits alone.

Source: Mixtral of Experts (arXiv 2401.04088), section 2.1; the auxiliary loss is that of Hugging
Face's load_balancing_loss_func (modeling_mixtral.py).
"""

import jax
import jax.numpy as jnp

from m4.model.routing import (
    Capacity,
    Routing,
    Tokens,
    assign_positions,
    balance_loss,
    check_choices,
    choice_shares,
    make_routing,
    top_k,
)
from m4.settings import Size, checked


@checked
def mixtral(tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 2) -> Routing:
    """Routes each token to its k best experts (ties: the lowest index); their weights sum to 1.

    The auxiliary loss is E * sum_e f_e P_e with means over all real tokens of the layer, not group
    by group; f counts all k choices, before capacity, each as 1/k of a token: 1 when balanced.
    (Hugging Face counts each as 1, k times this, and averages over the tokens of all layers.)

    Two parts of Mixtral are set elsewhere. Its experts are SwiGLU:
    `MoeLayer.activations = ("silu", "linear")`. And it drops no token, which
    outside training is the layer's default; in training a `train_capacity_factor` of E/k gives
    every token its slots, fewer take all first choices of a group in token order, then all second.

    Args:
        tokens: see `Tokens`; the router matrix is `score("router")`.
        num_experts: E. capacity: see `Capacity`; asked for k choices.
        choices: k.

    Raises:
        SettingError: choices not in [1, E].
    """
    check_choices("mixtral.choices", choices, num_experts)
    logits_GSE = tokens.score("router").astype(jnp.float32)
    best_GSK, expert_GSK = top_k(logits_GSE, choices)
    wants_GSK = jnp.broadcast_to(tokens.mask_GS[..., None], expert_GSK.shape)
    slots = capacity(choices)
    aux_loss = balance_loss(
        jax.nn.softmax(logits_GSE),
        choice_shares(expert_GSK, num_experts),
        tokens.mask_GS,
        by_group=False,
    )
    return make_routing(
        expert_GSK,
        assign_positions(expert_GSK, wants_GSK, num_experts, slots),
        jax.nn.softmax(best_GSK),
        mask_GS=tokens.mask_GS,
        wants_GSK=wants_GSK,
        num_experts=num_experts,
        capacity=slots,
        logits_GSE=logits_GSE,
        aux_loss=aux_loss,
    )

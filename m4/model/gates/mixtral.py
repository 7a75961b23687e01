"""Mixtral's gate: the k best experts, weighted with the softmax of their logits alone.

Source: Mixtral of Experts (arXiv 2401.04088), section 2.1; the auxiliary loss is that of Hugging
Face's load_balancing_loss_func (modeling_mixtral.py).
"""

import jax

from m4.model.routing import (
    Array,
    Capacity,
    Routing,
    Tokens,
    balance_loss,
    check_choices,
    plan_choices,
    top_k,
)
from m4.settings import Size, checked


@checked
def mixtral(tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 2) -> Routing:
    """Routes each token to its k best experts (ties: the lowest index); their weights sum to 1.

    The auxiliary loss is E * sum_e f_e P_e with means over all real tokens of the layer, not group
    by group; f counts all k choices, before capacity, each as 1/k of a token: 1 when balanced.
    (Hugging Face counts each as 1, which gives k times this loss, and averages over the tokens of
    all layers.)

    Two parts of Mixtral are set elsewhere. Its experts are SwiGLU, `MoeLayer.activations = ("silu",
    "linear")`. And it drops no token, which is the layer's default outside training; in training it
    takes `train_capacity_factor = None`. With a factor, slots go to all first choices of a group in
    token order, then to all second ones.

    Args:
        choices: k.
    """
    check_choices("mixtral.choices", choices, num_experts)
    return route(tokens.score("router"), tokens.mask_GS, num_experts, capacity, choices)


def route(
    logits_GSE: Array, mask_GS: Array, num_experts: int, capacity: Capacity, choices: int
) -> Routing:
    """Plans for given logits."""
    best_GSK, expert_GSK = top_k(logits_GSE, choices)
    probs_GSE = jax.nn.softmax(logits_GSE)
    return plan_choices(
        expert_GSK,
        jax.nn.softmax(best_GSK),
        mask_GS,
        num_experts,
        capacity(choices),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(probs_GSE, expert_GSK, mask_GS, by_group=False),
    )

"""Mixtral's gate: the k best experts, weighted by the softmax of only their logits.

Source: Mixtral of Experts (arXiv 2401.04088), section 2.1; the auxiliary loss is that of Hugging
Face's load_balancing_loss_func (modeling_mixtral.py).
"""

from m4.model.gates.topk import route
from m4.model.routing import Capacity, Routing, Tokens, check_choices
from m4.settings import Size, checked


@checked
def mixtral(tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 2) -> Routing:
    """Routes each token to the k best experts (ties: the lowest index); their weights sum to 1.

    The auxiliary loss is `balance_loss` with means over all real tokens of the layer, not group by
    group. (Hugging Face's is k times as large, and averages over the tokens of all layers.)

    Mixtral also has SwiGLU experts, `MoeLayer.activations = ("silu", "linear")`, and drops no
    token, `train_capacity_factor = None`.

    Args:
        choices: Number of experts per token, k.
    """
    check_choices("mixtral.choices", choices, num_experts)
    logits_GSE, how = tokens.score("router"), {"normalize": True, "by_group": False}
    return route(logits_GSE, tokens.mask_GS, num_experts, capacity, choices, **how)

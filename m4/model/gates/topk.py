"""Top-k gate: the gate of V-MoE, flaxformer or Tutel, depending on its options.

Sources: V-MoE (arXiv 2106.05974, section 2 and, for batch priority, section 4; vmoe moe.py),
flaxformer routing.py (TokensChooseMaskedRouter), Tutel (arXiv 2206.03382; fast_dispatch.py,
extract_critical).
"""

import jax

from m4.model import routing
from m4.model.routing import Array, Capacity, Routing, Tokens, at_experts, balance_loss
from m4.settings import Size, checked


@checked
def topk(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    choices: Size = 2,
    normalize: bool = False,
    batch_priority: bool = False,
) -> Routing:
    """Routes each token to its k best experts (ties: the lowest index).

    The auxiliary loss is `balance_loss`. f counts all k choices, before capacity, each as 1/k of a
    token: 1 when balanced. (flaxformer counts each as 1, which gives k times this loss.)

    Args:
        choices: Number of experts per token, k.
        normalize: Whether weights are p divided by the sum of the k best, before anything is
            dropped (Tutel), instead of p (V-MoE, flaxformer).
        batch_priority: Whether tokens get slots by falling p of their first choice instead of in
            their order (V-MoE), which looks at later tokens.
    """
    routing.check_choices("topk.choices", choices, num_experts)
    if batch_priority:
        routing.refuse_causal(tokens, "topk.batch_priority", batch_priority)
    how = {"normalize": normalize, "by_priority": batch_priority}
    return route(tokens.score("router"), tokens.mask_GS, num_experts, capacity, choices, **how)


def route(
    logits_GSE: Array,
    mask_GS: Array,
    num_experts: int,
    capacity: Capacity,
    choices: int,
    *,
    normalize: bool = False,
    by_priority: bool = False,
    by_group: bool = True,
) -> Routing:
    """Makes the plan for given logits; for `by_group`, see `balance_loss`."""
    probs_GSE = jax.nn.softmax(logits_GSE)
    # Chosen by logits, as probabilities that underflow to 0 no longer tell which is better.
    best_GSK, expert_GSK = routing.top_k(logits_GSE, choices)
    prob_GSK = at_experts(probs_GSE, expert_GSK)
    # The softmax of the k best logits is p over their sum, without a division of tiny numbers.
    weight_GSK = jax.nn.softmax(best_GSK) if normalize else prob_GSK
    return routing.plan_choices(
        *(expert_GSK, weight_GSK, mask_GS, num_experts, capacity(choices)),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(probs_GSE, expert_GSK, mask_GS, by_group=by_group),
        priority_GS=prob_GSK[..., 0] if by_priority else None,
    )

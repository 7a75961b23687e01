"""The k best experts: the gate of V-MoE, flaxformer, Tutel and MaxText, by its options.

Sources: V-MoE (arXiv 2106.05974, section 2 and, for batch priority, section 4; vmoe moe.py),
flaxformer routing.py (TokensChooseMaskedRouter), Tutel (arXiv 2206.03382; fast_dispatch.py,
extract_critical), MaxText moe.py (its path with drops).
"""

from typing import Annotated

import jax

from m4.model.routing import (
    Capacity,
    Routing,
    Tokens,
    at_experts,
    balance_loss,
    check_choices,
    plan_choices,
    refuse_causal,
    top_k,
)
from m4.settings import OneOf, Size, checked


@checked
def topk(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    choices: Size = 2,
    normalize: bool = False,
    slot_order: Annotated[str, OneOf(("choice", "token"))] = "choice",
    batch_priority: bool = False,
    paper_scale: bool = False,
) -> Routing:
    """Routes each token to its k best experts (ties: the lowest index).

    The auxiliary loss is E * sum_e f_e P_e over the real tokens of a group, then the mean over
    groups. f counts all k choices, before capacity, each as 1/k of a token: f sums to 1, and so the
    loss is 1 when balanced. (flaxformer counts each as 1, which gives k times this loss.)

    Args:
        choices: k.
        normalize: The weights are p divided by the sum of the k best, before anything is dropped
            (Tutel), instead of p (V-MoE, flaxformer).
        slot_order: "choice": all first choices of a group, then all second ones, ... (GShard and
            the others); "token": a token's choices together, so that its second goes before the
            next token's first (MaxText).
        batch_priority: Slots go to tokens by falling p of their first choice, not in their order
            (V-MoE), which looks at later tokens.
        paper_scale: Divides the auxiliary loss by E^2, as in GShard's line 13.
    """
    check_choices("topk.choices", choices, num_experts)
    if batch_priority:
        refuse_causal(tokens, "topk.batch_priority", batch_priority)
    logits_GSE = tokens.score("router")
    probs_GSE = jax.nn.softmax(logits_GSE)
    # Chosen by the logits: probabilities that underflow to 0 no longer tell who is better.
    best_GSK, expert_GSK = top_k(logits_GSE, choices)
    prob_GSK = at_experts(probs_GSE, expert_GSK)
    return plan_choices(
        expert_GSK,
        # The softmax of the k best logits is p over their sum, without a division of tiny numbers.
        jax.nn.softmax(best_GSK) if normalize else prob_GSK,
        tokens.mask_GS,
        num_experts,
        capacity(choices),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(probs_GSE, expert_GSK, tokens.mask_GS, paper_scale=paper_scale),
        priority_GS=prob_GSK[..., 0] if batch_priority else None,
        by_token=slot_order == "token",
    )

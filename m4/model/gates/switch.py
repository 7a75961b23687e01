"""Switch Transformer's gate: the one best expert, weighted with its probability.

Source: Switch Transformer (arXiv 2101.03961), section 2.2, and Mesh TensorFlow's _switch_gating
(moe.py 1180-1300); the z-loss is ST-MoE's (arXiv 2202.08906, equation 5).
"""

from typing import Annotated

import jax

from m4.model.routing import (
    Capacity,
    Routing,
    Tokens,
    at_experts,
    balance_loss,
    plan_choices,
    refuse_causal,
    top_k,
)
from m4.settings import OneOf, Rate, checked


@checked
def switch(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    jitter: Rate = 1e-2,
    priority: Annotated[str, OneOf(("order", "probability"))] = "order",
) -> Routing:
    """Routes each token to its best expert e (ties: the lowest index) with weight p_e.

    The weight is not normalised, because the router learns only through p_e. The auxiliary loss is
    E * sum_e f_e P_e over the real tokens of a group, then the mean over groups; 1 when balanced.
    f is the share of tokens whose best expert is e, before capacity, and P the mean of p_e.

    Args:
        jitter: In training the float32 copy of the tokens that the router sees is multiplied by
            U(1 - jitter, 1 + jitter).
        priority: Tokens that get the slots of a full expert. "order": the first ones of the group;
            "probability": those with the largest p_e (Mesh TensorFlow's switch_max), which looks at
            later tokens.
    """
    if priority == "probability":
        refuse_causal(tokens, "switch.priority", priority)
    noisy = tokens.train and tokens.rng is not None
    logits_GSE = tokens.score("router", jitter=jitter if noisy else 0.0, key=tokens.rng)
    probs_GSE = jax.nn.softmax(logits_GSE)
    _, expert_GSK = top_k(logits_GSE, 1)
    weight_GSK = at_experts(probs_GSE, expert_GSK)
    return plan_choices(
        expert_GSK,
        weight_GSK,
        tokens.mask_GS,
        num_experts,
        capacity(1),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(probs_GSE, expert_GSK, tokens.mask_GS),
        priority_GS=weight_GSK[..., 0] if priority == "probability" else None,
    )

"""Task-level routing: all tokens of a sentence have the same experts, those of its task.

Source: Kudugunta et al. 2021, "Beyond Distillation: Task-level Mixture-of-Experts for Efficient
Inference" (arXiv 2110.03742), section 3. A task needs only its own experts in inference.
"""

import jax

from m4.model.routing import (
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
def by_direction(
    tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 2
) -> Routing:
    """Routes all tokens of a task to the k best experts of the task's embedding.

    The logits are the task's embedding [M], which is learned, times the router's matrix [M, E]; the
    weights are the softmax of the k largest (ties: the lowest index). A task is a direction, or a
    group of directions with `Experiment.tasks`: those of a source language, a target language, a
    family (`m4.train.multitask.groups`). The plan depends neither on a token nor on its neighbours.

    The auxiliary loss is E * sum_e f_e P_e over all real tokens of the layer, so that tasks count
    by their tokens; f counts each of the k choices as 1/k of a token: 1 when balanced. Slots go to
    all first choices of a group in token order, then to all second ones. A sentence's tokens want
    the same slots, so that `train_capacity_factor = None` suits small groups.

    Args:
        choices: k.
    """
    check_choices("by_direction.choices", choices, num_experts)
    logits_GSE = tokens.score("router", by_task=True)
    best_GSK, expert_GSK = top_k(logits_GSE, choices)
    probs_GSE = jax.nn.softmax(logits_GSE)
    return plan_choices(
        expert_GSK,
        jax.nn.softmax(best_GSK),
        tokens.mask_GS,
        num_experts,
        capacity(choices),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(probs_GSE, expert_GSK, tokens.mask_GS, by_group=False),
    )

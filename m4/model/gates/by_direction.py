"""Task-level routing: all tokens of a sentence have the same experts, those of its task.

Source: Kudugunta et al. 2021, "Beyond Distillation: Task-level Mixture-of-Experts for Efficient
Inference" (arXiv 2110.03742), section 3. A task needs only its own experts in inference.
"""

from m4.model.gates.topk import route
from m4.model.routing import Capacity, Routing, Tokens, check_choices
from m4.settings import Size, checked


@checked
def by_direction(
    tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 2
) -> Routing:
    """Routes all tokens of a task to the k best experts of the task's embedding.

    The logits are the task's embedding [M], which is learned, times the router's matrix [M, E]; all
    else is as in `mixtral`, so that in the auxiliary loss tasks count by their tokens. A task is a
    direction, or with `Experiment.tasks` a group of directions, such as those of a target language
    or a family (`m4.train.multitask.groups`). A sentence's tokens want slots of the same experts:
    with groups of few sentences `train_capacity_factor = None` keeps them.
    """
    check_choices("by_direction.choices", choices, num_experts)
    logits_GSE, how = tokens.score("router", by_task=True), {"normalize": True, "by_group": False}
    return route(logits_GSE, tokens.mask_GS, num_experts, capacity, choices, **how)

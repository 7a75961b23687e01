"""Task-level routing: all tokens of a sentence go to the experts of its task.

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

    The logits are the task's learned embedding [M] times the router's matrix [M, E]; the rest is as
    in `mixtral`, so tasks count by their tokens in the auxiliary loss. A task is a direction or,
    with `Experiment.tasks`, a set of directions, such as those of a target language
    or a family (`m4.train.multitask.groups`). As a sentence's tokens want slots of the same
    experts, `train_capacity_factor = None` is needed to keep them in groups of few sentences.

    Args:
        choices: Number of experts per token, k.
    """
    check_choices("by_direction.choices", choices, num_experts)
    logits_GSE, how = tokens.score("router", by_task=True), {"normalize": True, "by_group": False}
    return route(logits_GSE, tokens.mask_GS, num_experts, capacity, choices, **how)

"""Dense-to-sparse gate: all experts at first, then fewer and fewer, and finally Switch's one.

Source: EvoMoE (arXiv 2112.14397), section 4.2, and its code in fairseq (topkgate.py and
cosine_heat_scheduler.py).
"""

from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model.gates.topk import route
from m4.model.routing import Capacity, Routing, Tokens, make_routing
from m4.settings import Between, InputError, Rate, SettingError, Steps, checked

Temperature = Annotated[float, Between(0, 1e6, above=True)]


@checked
def dense_to_sparse(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    tau_max: Temperature = 2.0,
    tau_min: Temperature = 0.3,
    anneal_steps: Steps = 10_000,
    warmup_steps: Steps = 0,
    threshold: Rate = 0.02,
) -> Routing:
    """Trains densely with Gumbel noise and falling temperature, then by Switch's top-1.

    In the dense phase, the first warmup_steps + anneal_steps, g = softmax((log p + Gumbel noise) /
    tau); there is no noise without random numbers. A token goes to each expert with g >
    threshold, with weight g, not renormalised. All tokens get slots, and there is no auxiliary
    loss. It is computed densely, with E times the work of top-1. After that, and always outside
    training, the plan is that of `switch` without jitter, with the layer's capacity and auxiliary
    loss.

    Training has one program for both phases: its plan has choice k for expert k and S slots, and
    after the dense phase Switch's plan as the shortcut. The metric `temperature` is tau.

    Args:
        tau_max: Temperature after the warm-up.
        tau_min: Temperature at the start of the warm-up, and after the annealing.
        anneal_steps: Steps in which tau falls as a cosine.
        warmup_steps: Steps in which tau rises linearly before that.
        threshold: Least g. It must be well below 1/E, or a token may get no expert.

    Raises:
        SettingError: `tau_min` is above `tau_max`.
        InputError: Training without the step, such as T5X's.
    """
    if tau_min > tau_max:
        raise SettingError("dense_to_sparse.tau_min", tau_min, f"at most tau_max = {tau_max}")
    logits_GSE = tokens.score("router")
    sparse = route(logits_GSE, tokens.mask_GS, num_experts, capacity, 1)
    if not tokens.train:
        return sparse
    if tokens.step is None:
        said = "the training step for its temperature, and this trainer does not pass `step`"
        raise InputError(f"dense_to_sparse needs {said} to the model")
    # Linear up to tau_max, then a cosine down to tau_min.
    t = jnp.asarray(tokens.step, jnp.float32)
    rise = tau_min + (tau_max - tau_min) * t / max(warmup_steps, 1)
    progress = jnp.clip((t - warmup_steps) / max(anneal_steps, 1), 0.0, 1.0)
    fall = tau_min + 0.5 * (tau_max - tau_min) * (1.0 + jnp.cos(jnp.pi * progress))
    tau = jnp.where(t < warmup_steps, rise, fall)
    noisy_GSE = jax.nn.log_softmax(logits_GSE)
    if tokens.rng is not None:
        noisy_GSE = noisy_GSE + jax.random.gumbel(tokens.rng, noisy_GSE.shape)
    gates_GSE, S = jax.nn.softmax(noisy_GSE / tau), logits_GSE.shape[1]
    # With S slots, token s has slot s at every expert; Switch's plan has one choice per token.
    opened_GSE = tokens.mask_GS[..., None] & (gates_GSE > threshold)
    dense_GSE = jnp.where(opened_GSE, jnp.arange(S)[None, :, None], -1)
    chosen_GSE = jax.nn.one_hot(sparse.expert_GSK[..., 0], num_experts, dtype=bool)
    use_sparse = tokens.step >= warmup_steps + anneal_steps
    position_GSE = jnp.where(use_sparse, jnp.where(chosen_GSE, sparse.position_GSK, -1), dense_GSE)
    weight_GSE = jnp.where(use_sparse, chosen_GSE * sparse.weight_GSK, gates_GSE)
    routing = make_routing(
        *(None, position_GSE, weight_GSE, tokens.mask_GS, num_experts, S),
        logits_GSE=logits_GSE,
        aux_loss=jnp.where(use_sparse, sparse.aux_loss, 0.0),
        metrics={"temperature": tau},
    )
    return replace(routing, shortcut=(use_sparse, sparse))

"""Dense-to-sparse: all experts at first, fewer and fewer, at last Switch's one.

Source: EvoMoE (arXiv 2112.14397), section 4.2, and its code in fairseq (topkgate.py and
cosine_heat_scheduler.py).
"""

from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model.gates.switch import switch
from m4.model.routing import Array, Capacity, Routing, Tokens, make_routing, masked_mean
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
    """Dense training with Gumbel noise and falling temperature, then Switch's top-1.

    Dense phase, the first warmup_steps + anneal_steps: g = softmax((log p + Gumbel noise) / tau);
    a token goes to every expert with g > threshold, with weight g, not renormalised; no token is
    dropped and there is no auxiliary loss. tau falls as a cosine from tau_max to tau_min, after a
    linear rise from tau_min in the warm-up. It is computed densely: E times the work of top-1.

    After that the plan is that of `switch` without jitter, with the layer's capacity and with the
    auxiliary loss; outside training always. Training is one program for both phases: its plan has
    choice k for expert k and S slots, and after the dense phase Switch's as its shortcut.

    Args:
        tokens: see `Tokens`; the router matrix is `score("router")`. Without `rng` no noise.
        num_experts: E. capacity: see `Capacity`; asked for one choice, by Switch.
        threshold: to be well below 1/E, or the dense phase may leave a token without any expert.

    Raises:
        SettingError: tau_min is above tau_max. ValueError: in training, no step is given.
    """
    if tau_min > tau_max:
        raise SettingError("dense_to_sparse.tau_min", tau_min, f"at most tau_max = {tau_max}")
    logits_GSE = tokens.score("router").astype(jnp.float32)
    scored = replace(tokens, score=lambda name, **_: logits_GSE)
    sparse = switch(scored, num_experts, capacity, jitter=0.0)
    if not tokens.train:
        return sparse
    if tokens.step is None:
        raise InputError(
            "dense_to_sparse needs the training step for its temperature, and this trainer does "
            "not pass `step` to the model"
        )
    tau = temperature(tokens.step, tau_max, tau_min, anneal_steps, warmup_steps)
    use_sparse = tokens.step >= warmup_steps + anneal_steps
    noisy_GSE = jax.nn.log_softmax(logits_GSE)
    if tokens.rng is not None:
        noisy_GSE = noisy_GSE + jax.random.gumbel(tokens.rng, noisy_GSE.shape)
    gates_GSE = jax.nn.softmax(noisy_GSE / tau)
    mask_GS1 = tokens.mask_GS[..., None]
    S = logits_GSE.shape[1]
    # With S slots each token has its own, the same with every expert.
    own_1S1 = jnp.arange(S)[None, :, None]
    opened_GSE = mask_GS1 & (gates_GSE > threshold)
    # Switch's plan in the same shape: its one choice at its expert's place.
    best_GSE = jax.nn.one_hot(sparse.expert_GSK[..., 0], num_experts, dtype=bool)
    position_GSE = jnp.where(
        use_sparse,
        jnp.where(best_GSE, sparse.position_GSK, -1),
        jnp.where(opened_GSE, own_1S1, -1),
    )
    routing = make_routing(
        jnp.broadcast_to(jnp.arange(num_experts)[None, None], logits_GSE.shape),
        position_GSE,
        jnp.where(use_sparse, best_GSE * sparse.weight_GSK, gates_GSE),
        mask_GS=tokens.mask_GS,
        wants_GSK=jnp.where(use_sparse, best_GSE & mask_GS1, opened_GSE),
        num_experts=num_experts,
        capacity=S,
        logits_GSE=logits_GSE,
        aux_loss=jnp.where(use_sparse, sparse.aux_loss, 0.0),
        ranked=False,
    )
    metrics = {
        "experts_per_token": masked_mean(jnp.sum(position_GSE >= 0, axis=-1), tokens.mask_GS),
        "temperature": tau,
    }
    return replace(routing, metrics={**routing.metrics, **metrics}, shortcut=(use_sparse, sparse))


def temperature(
    step: Array, tau_max: float, tau_min: float, anneal_steps: int, warmup_steps: int
) -> Array:
    """tau of a step (steps done): linear up to tau_max, cosine down to tau_min, then tau_min."""
    t = jnp.asarray(step, jnp.float32)
    rise = tau_min + (tau_max - tau_min) * t / max(warmup_steps, 1)
    progress = jnp.clip((t - warmup_steps) / max(anneal_steps, 1), 0.0, 1.0)
    fall = tau_min + 0.5 * (tau_max - tau_min) * (1.0 + jnp.cos(jnp.pi * progress))
    return jnp.where(t < warmup_steps, rise, fall)

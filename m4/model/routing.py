"""The plan that a gate makes: experts, slots and weights of all choices, and number of slots.

A gate only plans: it returns a `Routing`, and a function of `m4.model.dispatch` moves the tokens.
Plans are float32 and int32, whatever the model's type, because a cumulative sum in bfloat16 stops
counting at 256.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from m4.settings import Between, SettingError

Array = jax.Array


@struct.dataclass
class Routing:
    """The plan for one layer's tokens."""

    expert_GSK: Array  # The expert of each choice, int32 in [0, E); a token's choices differ.
    # The choice's slot among those of its group and expert, int32 in [0, C), or -1 without a slot.
    position_GSK: Array
    # Factor of the expert's output, float32, not negative; 0 without a slot. It is at most 1,
    # except with gates that scale it (`deepseek.route_scale`).
    weight_GSK: Array
    aux_loss: Array  # Scalar, the gate's balance loss; the gate's docstring gives its scale.
    z_loss: Array  # scalar, mean of logsumexp(logits)^2 over real tokens
    # Scalars and `load_E` [E] to log (`make_routing`); the trainer averages them over layers.
    metrics: Mapping[str, Array]
    num_experts: int = struct.field(pytree_node=False)  # E
    capacity: int = struct.field(pytree_node=False)  # number of slots of a (group, expert), C
    # (use, plan) for a gate with phases, one of which needs larger shapes than the others: if the
    # scalar `use` is True, `plan` gives the same result with fewer slots or choices.
    shortcut: "tuple[Array, Routing] | None" = None
    # Number of real tokens' choices of each expert, before capacity, for a gate with a bias
    # (`Tokens.bias`).
    bias_load_E: Array | None = None
    # Change of the bias in a training step.
    bias_rate: float = struct.field(pytree_node=False, default=0.0)


@struct.dataclass
class Tokens:
    """The tokens of a layer, as far as a gate may look at them."""

    # (name, *, init, jitter, key, by_task) -> logits_GSE, float32: tokens multiplied by
    # U(1 - jitter, 1 + jitter), or learned embeddings of their tasks, times a matrix made on demand
    # (`m4.model.moe.MoeLayer._score`).
    score: Callable[..., Array] = struct.field(pytree_node=False)
    mask_GS: Array  # True for real tokens; padding is never guessed from values.
    ids_GS: Array | None = None  # token ids, the input ids of the layer's stack
    step: Array | None = None  # Number of training steps done, int32 scalar; None outside training.
    rng: Array | None = None  # Random key; None for deterministic routing.
    # (name, V -> initial values) -> int32 table that checkpoints keep.
    table: Callable[[str, Any], Array] | None = struct.field(pytree_node=False, default=None)
    # () -> the bias of each expert, float32 [E], which checkpoints keep and which moves against the
    # experts' load after a training step.
    bias: Callable[[], Array] | None = struct.field(pytree_node=False, default=None)
    train: bool = struct.field(pytree_node=False, default=False)  # True in a training step
    # True in a decoder, which a gate that looks at later tokens must refuse.
    causal: bool = struct.field(pytree_node=False, default=False)


Capacity = Callable[[int], int]
"""Number of choices per token -> slots of a (group, expert), by the layer's factor and rule."""


class Gate(Protocol):
    """Plans where tokens go: `capacity` is asked for the number of a token's choices."""

    def __call__(self, tokens: Tokens, num_experts: int, capacity: Capacity) -> Routing: ...


CapacityFactor = Annotated[float, Between(0, 1e6, above=True)]

# Rounding of the exact share K*S*factor/E to slots. No expert needs more than S.
CAPACITY_RULES: Mapping[str, Callable[[float], int]] = {
    # GShard, arXiv 2006.16668, section 2.2: C = 2S/E, here rounded up to whole slots.
    "paper": lambda slots: max(math.ceil(slots - 1e-6), 1),  # so that 55.00000000000001 is 55
    # Lingvo, gshard_layers.py 2062-2077: at least 4, a multiple of 4.
    "lingvo": lambda slots: math.ceil(max(int(slots), 4) / 4) * 4,
    # flaxformer, moe_layers.py 175-178: rounded half to even, at least 4.
    "flaxformer": lambda slots: max(round(slots), 4),
}


def expert_capacity(
    group_tokens: int, num_experts: int, factor: float, choices: int = 2, rule: str = "lingvo"
) -> int:
    """Returns the number of slots of a (group, expert): factor * K * S / E, rounded, at most S.

    A factor of 1 with two choices is the paper's 2S/E. (Factors of Lingvo and T5X count both
    choices: their 2.0 is 1.0 here.)
    """
    exact = group_tokens * choices * factor / num_experts
    return min(group_tokens, CAPACITY_RULES[rule](exact))


def assign_positions(
    expert_GSK: Array,
    wants_GSK: Array,
    num_experts: int,
    capacity: int,
    priority_GS: Array | None = None,
) -> Array:
    """Hands out slots in the papers' order: all first choices, then all second ones, ...

    Args:
        wants_GSK: False for choices that take no slot.
        priority_GS: Priority of tokens, highest first, within a choice; ties go to the earlier
            token. Defaults to the order of tokens.

    Returns:
        position_GSK, with -1 for choices that are not wanted or find their expert full.
    """
    G, S, K = expert_GSK.shape
    if priority_GS is not None:
        order_GS = jnp.argsort(-priority_GS, axis=1, stable=True)
        back_GS = jnp.argsort(order_GS, axis=1)
        expert_GSK, wants_GSK = (
            jnp.take_along_axis(x, order_GS[..., None], axis=1) for x in (expert_GSK, wants_GSK)
        )
    in_order_GJ, wants_GJ = (
        jnp.swapaxes(x, 1, 2).reshape(G, S * K) for x in (expert_GSK, wants_GSK)
    )
    wants_GJE = jax.nn.one_hot(in_order_GJ, num_experts, dtype=jnp.int32) * wants_GJ[..., None]
    before_GJE = jnp.cumsum(wants_GJE, axis=1) - wants_GJE  # Algorithm 1, lines 9-12
    position_GJ = jnp.take_along_axis(before_GJE, in_order_GJ[..., None], axis=2)[..., 0]
    kept_GJ = jnp.where(wants_GJ & (position_GJ < capacity), position_GJ, -1)
    position_GSK = jnp.swapaxes(kept_GJ.reshape(G, K, S), 1, 2)
    if priority_GS is not None:
        position_GSK = jnp.take_along_axis(position_GSK, back_GS[..., None], axis=1)
    return position_GSK


def balance_loss(
    probs_GSE: Array,
    expert_GSK: Array,
    mask_GS: Array,
    *,
    real_token_means: bool = True,
    paper_scale: bool = False,
    by_group: bool = True,
) -> Array:
    """Returns the papers' auxiliary loss, E * sum_e (share of choices of e) * (mean of p[:, e]).

    It is computed over each group's real tokens and averaged over groups; 1 when balanced, as each
    of a token's K choices counts as 1/K. (With plain counts, as in flaxformer, HF Mixtral and
    MaxText, it is K times as large.)

    Args:
        real_token_means: Means are over a group's real tokens, then over the groups that have any;
            False divides by S and by all groups, padding included (paper, Lingvo's legacy).
        paper_scale: Divides by E^2: GShard's scale (arXiv 2006.16668, Algorithm 1, line 13).
        by_group: False treats all tokens as one group.
    """
    G, S, E = probs_GSE.shape
    axes, tokens = ((1,), S) if by_group else ((0, 1), G * S)
    # With by_group = False, G is 1 below.
    chosen_GSE = jnp.mean(jax.nn.one_hot(expert_GSK, E, dtype=jnp.float32), axis=2)
    real_GS1 = mask_GS[..., None]
    real_G1 = jnp.sum(real_GS1, axis=axes, keepdims=True)[:, 0].astype(jnp.float32)
    denominator = jnp.maximum(real_G1, 1.0) if real_token_means else float(tokens)
    share_GE = jnp.sum(chosen_GSE * real_GS1, axis=axes, keepdims=True)[:, 0] / denominator
    mean_GE = jnp.sum(probs_GSE * real_GS1, axis=axes, keepdims=True)[:, 0] / denominator
    loss_G = E * jnp.sum(share_GE * mean_GE, axis=-1)
    loss = jnp.mean(loss_G)  # a group with only padding has 0
    if real_token_means and len(loss_G) > 1:
        loss = masked_mean(loss_G, real_G1[:, 0] > 0)
    return loss / E**2 if paper_scale else loss


def at_experts(x_GSE: Array, expert_GSK: Array) -> Array:
    """Returns x[g, s, expert[g, s, k]] without a gather, whose gradient would be a scatter."""
    is_GSKE = jax.nn.one_hot(expert_GSK, x_GSE.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(is_GSKE, x_GSE[:, :, None, :], 0.0), axis=-1)


def plan_choices(
    expert_GSK: Array,
    weight_GSK: Array,
    mask_GS: Array,
    num_experts: int,
    capacity: int,
    *,
    wants_GSK: Array | None = None,
    unwanted_use_slots: bool = False,
    priority_GS: Array | None = None,
    ranked: bool = True,
    **about: Any,
) -> Routing:
    """Makes a plan in which real tokens ask for a slot at each of their experts.

    Args:
        wants_GSK: False for choices that the token gives up. Defaults to all True.
        unwanted_use_slots: Whether choices that are given up use up a slot, without getting it.
        priority_GS: See `assign_positions`.
        ranked: Whether choices are in order of preference, the first one best.
        about: logits_GSE, aux_loss and metrics for `make_routing`.
    """
    real_GSK = jnp.broadcast_to(mask_GS[..., None], expert_GSK.shape)
    wants_GSK = real_GSK if wants_GSK is None else real_GSK & wants_GSK
    asks_GSK = real_GSK if unwanted_use_slots else wants_GSK
    position_GSK = assign_positions(expert_GSK, asks_GSK, num_experts, capacity, priority_GS)
    if unwanted_use_slots:
        position_GSK = jnp.where(wants_GSK, position_GSK, -1)
    return make_routing(
        *(expert_GSK, position_GSK, weight_GSK, mask_GS, num_experts, capacity),
        ranked_GSK=wants_GSK if ranked else None,
        **about,
    )


def make_routing(
    expert_GSK: Array | None,
    position_GSK: Array,
    weight_GSK: Array,
    mask_GS: Array,
    num_experts: int,
    capacity: int,
    *,
    ranked_GSK: Array | None = None,
    logits_GSE: Array | None = None,
    aux_loss: Array | float = 0.0,
    metrics: Mapping[str, Array] | None = None,
) -> Routing:
    """Makes a plan with the metrics of every gate, without gradients.

    `load_E` has each expert's share of the choices with a slot; `router_entropy` is in nats.

    Args:
        expert_GSK: Expert of each choice, or None for K = E, where choice k is expert k.
        weight_GSK: Weights; they count only for choices with a slot.
        ranked_GSK: Choices that asked for a slot, in order of preference; for metrics.
        logits_GSE: Logits, for z-loss and entropy. Without them the z-loss is 0.
    """
    assigned_GSK = position_GSK >= 0
    # Shares of real tokens.
    found = {"fraction_tokens_left_behind": masked_mean(~jnp.any(assigned_GSK, axis=-1), mask_GS)}
    if ranked_GSK is not None:
        found["first_overflow"] = masked_mean((ranked_GSK & ~assigned_GSK)[..., 0], mask_GS)
    if ranked_GSK is not None and ranked_GSK.shape[-1] > 1:
        found["second_overflow"] = masked_mean((ranked_GSK & ~assigned_GSK)[..., 1], mask_GS)
        found["second_dropped"] = masked_mean(~assigned_GSK[..., 1], mask_GS)
    if expert_GSK is None:
        count_E = jnp.sum(assigned_GSK, axis=(0, 1))
        found["experts_per_token"] = masked_mean(jnp.sum(assigned_GSK, axis=-1), mask_GS)
        expert_GSK = jnp.broadcast_to(jnp.arange(num_experts)[None, None], position_GSK.shape)
    else:
        one_GSKE = jax.nn.one_hot(expert_GSK, num_experts, dtype=jnp.int32)
        count_E = jnp.sum(one_GSKE * assigned_GSK[..., None], axis=(0, 1, 2))
    found["load_E"] = count_E / jnp.maximum(jnp.sum(count_E), 1)
    found["dead_experts"] = jnp.sum(count_E == 0).astype(jnp.float32)
    z_loss = jnp.zeros(())
    if logits_GSE is not None:
        # ST-MoE, arXiv 2202.08906, equation 5.
        z_loss = masked_mean(jnp.square(jax.nn.logsumexp(logits_GSE, axis=-1)), mask_GS)
        log_GSE = jax.nn.log_softmax(logits_GSE)
        found["router_entropy"] = masked_mean(-jnp.sum(jnp.exp(log_GSE) * log_GSE, -1), mask_GS)
    return Routing(
        expert_GSK=expert_GSK.astype(jnp.int32),
        position_GSK=position_GSK.astype(jnp.int32),
        weight_GSK=jnp.where(assigned_GSK, weight_GSK, 0.0).astype(jnp.float32),
        aux_loss=jnp.asarray(aux_loss, jnp.float32),
        z_loss=z_loss,
        num_experts=num_experts,
        capacity=capacity,
        metrics=jax.lax.stop_gradient({**found, **(metrics or {})}),
    )


def masked_mean(x: Array, mask: Array) -> Array:
    """Averages x where the mask is True; returns 0 if it is True nowhere."""
    mask = mask.astype(jnp.float32)
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def top_k(logits_GSE: Array, choices: int) -> tuple[Array, Array]:
    """Returns the largest logits and their experts, GSK; ties go to the lowest index.

    It is faster than `lax.top_k`, whose gradient is a scatter and whose CPU program a sort.
    """
    values, experts = [], []
    left_GSE = logits_GSE
    for _ in range(choices):
        expert_GS = jnp.argmax(left_GSE, axis=-1)
        is_GSE = jax.nn.one_hot(expert_GS, logits_GSE.shape[-1], dtype=bool)
        values.append(jnp.sum(jnp.where(is_GSE, logits_GSE, 0.0), axis=-1))
        experts.append(expert_GS)
        left_GSE = jnp.where(is_GSE, -jnp.inf, left_GSE)
    return jnp.stack(values, axis=-1), jnp.stack(experts, axis=-1).astype(jnp.int32)


def check_choices(setting: str, choices: int, most: int) -> None:
    """Raises SettingError unless a token can choose this many experts."""
    if not 1 <= choices <= most:
        raise SettingError(setting, choices, f"from 1 to {most}, the experts to choose from")


def refuse_causal(tokens: Tokens, setting: str, value: Any) -> None:
    """Raises SettingError in a decoder, for a gate that looks at later tokens."""
    if tokens.causal:
        allowed = (
            "something else in a decoder, as it looks at later tokens; Transformer.decoder_moe "
            "gives the decoder another gate"
        )
        raise SettingError(setting, value, allowed)

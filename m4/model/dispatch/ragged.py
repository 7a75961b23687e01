"""Choices sorted by expert and ragged products: no empty slots are computed.

As MegaBlocks (arXiv 2211.15841) it is meant for plans that drop nothing, whose capacity is that of
the worst case: the work is that of the choices, not of E*C slots. A plan's slots are respected all
the same: a choice without one contributes nothing. Moving rows is `gather`'s.
"""

import math
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from m4.model.dispatch import by_devices, layout
from m4.model.dispatch.gather import Slots, combine, send
from m4.model.experts import Experts
from m4.model.routing import Array, Routing
from m4.parallel.mesh import split_axes
from m4.settings import configurable

# Of a GPU as jax 0.10.2 compiles it: docs/gpu.md.
DENSE_WARNING = (
    "ragged: on CPUs and GPUs lax.ragged_dot is a dense expansion, E times the work and the "
    "memory; use gather (MoeLayer.dispatch)"
)


@configurable
def ragged(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """The same result as `einsum`, by `lax.ragged_dot` over sorted choices.

    On a mesh each device sorts its own groups and brings all experts to it: kernels travel, not
    tokens. Groups that do not divide over the devices are worked on by all of them.

    Warns:
        UserWarning: elsewhere than on a TPU.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if (device.platform if device is not None else jax.default_backend()) != "tpu":
        warnings.warn(DENSE_WARNING, UserWarning, stacklevel=2)  # Python shows it once a place

    def on_a_device(x_GSM, expert_GSK, position_GSK, weight_GSK, experts):
        E, C = routing.num_experts, routing.capacity
        return _by_rows(x_GSM, expert_GSK, position_GSK, weight_GSK, experts, E, C)

    return by_own_groups(on_a_device, x_GSM, routing, experts)


def by_own_groups(
    on_a_device: Callable[..., Array], x_GSM: Array, routing: Routing, experts: Experts
) -> Array:
    """on_a_device(x_GSM, expert_GSK, position_GSK, weight_GSK, experts) with each device's groups
    and all experts; with all groups where they do not divide over the devices."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = split_axes(mesh, "batch")
    arrays = (x_GSM, routing.expert_GSK, routing.position_GSK, routing.weight_GSK, experts)
    if not axes or x_GSM.shape[0] % math.prod(mesh.shape[name] for name in axes) != 0:
        return on_a_device(*arrays)

    by_groups = PartitionSpec(axes)
    specs = *(by_groups,) * 4, layout(experts, PartitionSpec(), PartitionSpec(None, axes))
    return by_devices(on_a_device, axes, specs, by_groups)(*arrays)


def order_by_expert(
    expert_GSK: Array, position_GSK: Array, num_experts: int, capacity: int
) -> tuple[Slots, Array]:
    """The choices that have slots in the order (expert, group, slot): (slots, size_EG).

    All groups are one here: the slots of J = G*S*K choices in P = min(J, E*G*C) rows, the rows
    that no choice needs at the end. size_EG counts each expert's rows of a group. By counting, not
    by comparison: slots are in that order already, and a running count of taken ones numbers the
    rows.
    """
    G, S, K = expert_GSK.shape
    J, slots = G * S * K, num_experts * G * capacity
    P = min(J, slots)
    group_G11 = jnp.arange(G, dtype=jnp.int32)[:, None, None]
    position_GSK = jnp.where(
        position_GSK >= 0, (expert_GSK * G + group_G11) * capacity + position_GSK, slots
    )
    slot_J = position_GSK.reshape(J)
    taken = jnp.zeros((slots,), jnp.int32).at[slot_J].set(1, mode="drop")
    row = jnp.cumsum(taken) - taken
    row_J = row.at[slot_J].get(mode="fill", fill_value=P)
    choice_J = jnp.arange(J, dtype=jnp.int32)
    owner_P = jnp.full((P,), J, jnp.int32).at[row_J].set(choice_J, mode="drop")
    size_EG = jnp.sum(taken.reshape(num_experts, G, capacity), axis=2)
    return Slots(owner_P[None], row_J[None]), size_EG


def _by_rows(
    x_GSM: Array,
    expert_GSK: Array,
    position_GSK: Array,
    weight_GSK: Array,
    experts: Experts,
    num_experts: int,
    capacity: int,
) -> Array:
    G, S, K = expert_GSK.shape
    slots, size_EG = order_by_expert(expert_GSK, position_GSK, num_experts, capacity)
    size_E = jnp.sum(size_EG, axis=1)
    owner_P = slots.owner_GP[0]
    # What a ragged product gives for rows outside every expert's is left open, in gradients too.
    real_P1 = (owner_P < G * S * K)[:, None]
    choice_P = jnp.minimum(owner_P, G * S * K - 1)
    expert_P = expert_GSK.reshape(-1)[choice_P]
    group_P = choice_P // (S * K)

    def product(x_PM: Array, w_EMF: Array) -> Array:
        y_PF = lax.ragged_dot(jnp.where(real_P1, x_PM, 0), w_EMF, size_E)
        return jnp.where(real_P1, y_PF, 0)

    def spread(keep_EG1F: Array) -> Array:
        return keep_EG1F[expert_P, group_P, 0]

    sent_1PM = send(x_GSM.reshape(1, G * S, -1), slots)
    done_PM = experts(sent_1PM[0], product=product, spread=spread).astype(x_GSM.dtype)
    return combine(done_PM[None], weight_GSK.reshape(1, G * S, K), slots).reshape(x_GSM.shape)

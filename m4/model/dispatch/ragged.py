"""Choices sorted by expert and ragged products: no empty seats are computed.

As MegaBlocks (arXiv 2211.15841) it is meant for plans that drop nothing, whose capacity is that of
the worst case: the work is that of the choices, not of E*C seats. A plan's seats are respected all
the same: a choice without one contributes nothing. Moving rows is `gather`'s.
"""

import math
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from m4.model.dispatch import layout, own
from m4.model.dispatch.gather import Places, combine, send
from m4.model.experts import Experts
from m4.model.routing import Array, Routing
from m4.parallel.mesh import split_axes
from m4.settings import configurable

CPU_WARNING = (
    "ragged: on a CPU lax.ragged_dot is a dense expansion, E times the work and the memory; "
    "use gather (MoeLayer.dispatch)"
)


@configurable
def ragged(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """The same result as `einsum`, by `lax.ragged_dot` over sorted choices.

    On a mesh each device sorts its own groups and brings all experts to it: kernels travel, not
    tokens. Groups that do not divide over the devices are everybody's.

    Warns:
        UserWarning: on a CPU.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if (device.platform if device is not None else jax.default_backend()) == "cpu":
        warnings.warn(CPU_WARNING, UserWarning, stacklevel=2)  # Python shows it once a place

    axes = split_axes(mesh, "batch")
    whole = not axes or x_GSM.shape[0] % math.prod(mesh.shape[name] for name in axes) != 0

    def on_a_device(x_GSM, expert_GSK, seat_GSK, weight_GSK, experts):
        if not whole:
            experts = own(experts, axes)
        return _by_rows(
            x_GSM, expert_GSK, seat_GSK, weight_GSK, experts, routing.num_experts, routing.capacity
        )

    arrays = (x_GSM, routing.expert_GSK, routing.seat_GSK, routing.weight_GSK, experts)
    if whole:
        return on_a_device(*arrays)
    by_groups = PartitionSpec(axes)
    return jax.shard_map(
        on_a_device,
        in_specs=(*(by_groups,) * 4, layout(experts, PartitionSpec(), PartitionSpec(None, axes))),
        out_specs=by_groups,
        axis_names=set(axes),
    )(*arrays)


def order_by_expert(
    expert_GSK: Array, seat_GSK: Array, num_experts: int, capacity: int
) -> tuple[Places, Array]:
    """The choices that have seats in the order (expert, group, seat): (places, size_E).

    All groups are one here: the places of N = G*S*K choices in R = min(N, E*G*C) rows, the rows
    that nobody needs at the end. size_E counts each expert's rows. By counting, not by comparison:
    seats are in that order already, and a running count of the taken ones numbers the rows.
    """
    G, S, K = expert_GSK.shape
    N, seats = G * S * K, num_experts * G * capacity
    R = min(N, seats)
    group_G11 = jnp.arange(G, dtype=jnp.int32)[:, None, None]
    seat_GSK = jnp.where(seat_GSK >= 0, (expert_GSK * G + group_G11) * capacity + seat_GSK, seats)
    seat_N = seat_GSK.reshape(N)
    taken = jnp.zeros((seats,), jnp.int32).at[seat_N].set(1, mode="drop")
    row = jnp.cumsum(taken) - taken
    row_N = row.at[seat_N].get(mode="fill", fill_value=R)
    choice_N = jnp.arange(N, dtype=jnp.int32)
    owner_R = jnp.full((R,), N, jnp.int32).at[row_N].set(choice_N, mode="drop")
    size_E = jnp.sum(taken.reshape(num_experts, G * capacity), axis=1)
    return Places(owner_R[None], row_N[None]), size_E


def _by_rows(
    x_GSM: Array,
    expert_GSK: Array,
    seat_GSK: Array,
    weight_GSK: Array,
    experts: Experts,
    num_experts: int,
    capacity: int,
) -> Array:
    G, S, K = expert_GSK.shape
    places, size_E = order_by_expert(expert_GSK, seat_GSK, num_experts, capacity)
    owner_R = places.owner_GP[0]
    # What a ragged product gives for rows outside every expert's is left open, in gradients too.
    real_R1 = (owner_R < G * S * K)[:, None]
    choice_R = jnp.minimum(owner_R, G * S * K - 1)
    expert_R = expert_GSK.reshape(-1)[choice_R]
    group_R = choice_R // (S * K)

    def product(x_RM: Array, w_EMF: Array) -> Array:
        y_RF = lax.ragged_dot(jnp.where(real_R1, x_RM, 0), w_EMF, size_E)
        return jnp.where(real_R1, y_RF, 0)

    def spread(keep_EG1F: Array) -> Array:
        return keep_EG1F[expert_R, group_R, 0]

    sent_1RM = send(x_GSM.reshape(1, G * S, -1), places)
    done_RM = experts(sent_1RM[0], product=product, spread=spread).astype(x_GSM.dtype)
    return combine(done_RM[None], weight_GSK.reshape(1, G * S, K), places).reshape(x_GSM.shape)

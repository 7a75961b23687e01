"""Transport by choices sorted by expert and ragged products, without computing empty slots.

Like MegaBlocks (arXiv 2211.15841), it is meant for plans that drop nothing and have worst-case
capacity: the work is that of the choices, not of E*C slots. In other plans, a choice without a slot
contributes nothing. Rows are moved as in `gather`.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax

from m4.model.dispatch import by_groups
from m4.model.dispatch.gather import Slots, combine, send
from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.settings import configurable


@configurable
def ragged(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens by `lax.ragged_dot` over sorted choices.

    On a mesh, each device sorts its own groups and gathers all experts: kernels travel, not tokens.
    Groups that do not divide over the devices are computed by all of them.

    Warns:
        UserWarning: The devices are not TPUs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if (device.platform if device is not None else jax.default_backend()) != "tpu":
        # On an H100 with jax 0.11.2 it took 34 times the time of `gather` (docs/gpu.md).
        said = (
            "ragged: on CPUs and GPUs lax.ragged_dot is a dense expansion, E times the work and "
            "the memory; use gather (MoeLayer.dispatch)"
        )
        warnings.warn(said, UserWarning, stacklevel=2)  # Python shows it once per caller
    on_a_device = functools.partial(_by_rows, routing.num_experts, routing.capacity)
    return by_groups(on_a_device, x_GSM, routing, experts, own=False)


def order_by_expert(
    expert_GSK: Array, position_GSK: Array, num_experts: int, capacity: int
) -> tuple[Slots, Array]:
    """Numbers the choices with slots in the order (expert, group, slot), by counting.

    Returns:
        Slots with all groups as one: J = G*S*K choices in P = min(J, E*G*C) rows, unused rows at
        the end; and size_EG, the number of each expert's rows of a group.
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


def _by_rows(E: int, C: int, x_GSM, expert_GSK, position_GSK, weight_GSK, experts) -> Array:
    G, S, K = expert_GSK.shape
    slots, size_EG = order_by_expert(expert_GSK, position_GSK, E, C)
    size_E = jnp.sum(size_EG, axis=1)
    owner_P = slots.owner_GP[0]
    # A ragged product leaves open what it returns for rows outside all experts', and so do its
    # gradients.
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

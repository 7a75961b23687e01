"""Choices sorted by expert in blocks of rows, and a loop over the blocks that are there.

For plans that drop nothing, whose capacity is that of the worst case (MegaBlocks, arXiv
2211.15841): shapes are fixed, the work is that of the choices. A block has rows of one expert, so a
row meets no other expert's matrices, and a product has the same shape whatever the routing does: a
row's result does not depend on the rows next to it, to the last bit. A plan's slots are respected
all the same: a choice without one contributes nothing. Moving rows is `gather`'s.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from m4.model.block_product import block_product
from m4.model.dispatch.all_to_all import by_expert_shards, experts_over
from m4.model.dispatch.gather import Slots, combine, fetch, send
from m4.model.dispatch.ragged import by_own_groups, order_by_expert
from m4.model.experts import Experts
from m4.model.routing import Array, Routing
from m4.model.row_exchange import Came, rows_a_round, travel, trip_of
from m4.settings import configurable

_FEWEST, _MOST = 4, 128  # rows of a block
FEWEST_OVER_DEVICES = 8  # the least that a TPU reads at once


class Blocks(NamedTuple):
    """Where rows lie. N blocks of b rows; J = G*S*K choices.

    slots: choices to rows and back, all groups as one. expert_N: the expert of each block, E for
    those that are not there. count: how many are there, the first ones.
    """

    slots: Slots
    expert_N: Array
    count: Array


def rows_of_block(choices: int, num_experts: int, fewest: int = _FEWEST) -> int:
    """b: half of an expert's rows where all have as many, up to 16 all of them, a power of 2.

    Measured on CPUs: smaller blocks read an expert's matrices too often, larger ones have too many
    empty rows. Up to 16 rows an expert's matrices take longer to read than to multiply.
    """
    rows = max(choices // num_experts, 1)
    half = 2 ** max(rows.bit_length() - 2, 0)
    least = fewest if rows < 4 else max(fewest, 8)
    return min(max(half, min(2 * half, 16), least), _MOST)


def most_blocks(choices: int, num_experts: int, rows: int) -> int:
    """N: enough for any routing, as each expert's last block may be all but empty."""
    return -(-choices // rows) + min(num_experts, choices)


def blocks_of(expert_J: Array, row_J: Array, size_E: Array, most: int, rows: int) -> Blocks:
    """The blocks of choices in the order of experts.

    row_J: a choice's number in that order; -1: it has no row. size_E: each expert's rows. most: of
    all rows. rows: b.
    """
    J, E = expert_J.shape[0], size_E.shape[0]
    N = most_blocks(most, E, rows)
    blocks_E = -(-size_E // rows)
    end_E = jnp.cumsum(blocks_E)
    expert_N = jnp.sum(jnp.arange(N, dtype=jnp.int32)[:, None] >= end_E[None], axis=1)
    # What an expert's first row is moved by: to the beginning of its first block.
    moved_E = (end_E - blocks_E) * rows - (jnp.cumsum(size_E) - size_E)
    row_J = jnp.where(row_J >= 0, row_J + moved_E[expert_J], N * rows)
    choice_J = jnp.arange(J, dtype=jnp.int32)
    owner_P = jnp.full((N * rows,), J, jnp.int32).at[row_J].set(choice_J, mode="drop")
    return Blocks(Slots(owner_P[None], row_J[None]), expert_N, end_E[-1])


@configurable
def blocks(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """The same result as `einsum`.

    Where experts are sharded, rows travel to the devices of their experts (`row_exchange`).
    Without an expert axis each device sorts its own groups; groups that do not divide over the
    devices are worked on by all of them.

    Raises:
        ValueError: groups or experts that do not divide over the devices of an expert axis.
    """
    axes = experts_over("blocks", x_GSM, routing)
    on_a_device = functools.partial(_on_a_device, routing.num_experts, routing.capacity)
    if not axes:
        return by_own_groups(on_a_device, x_GSM, routing, experts)
    rows = rows_of_block(routing.expert_GSK.size, routing.num_experts, FEWEST_OVER_DEVICES)
    travelling = functools.partial(_over_devices, routing.num_experts, routing.capacity, rows, axes)
    return by_expert_shards(travelling, x_GSM, routing, experts)


def _on_a_device(
    E: int, C: int, x_GSM, expert_GSK, position_GSK, weight_GSK, experts: Experts
) -> Array:
    G, S, K = expert_GSK.shape
    expert_J = expert_GSK.reshape(-1)
    group_J = jnp.arange(G * S * K) // (S * K)
    sorted_, size_EG = order_by_expert(expert_GSK, position_GSK, E, C)
    row_J = jnp.where(position_GSK.reshape(-1) >= 0, sorted_.slot_GJ[0], -1)
    rows = rows_of_block(G * S * K, E)
    plan = blocks_of(expert_J, row_J, jnp.sum(size_EG, axis=1), sorted_.owner_GP.shape[1], rows)
    sent_PM = send(x_GSM.reshape(1, G * S, -1), plan.slots)[0]
    done_PM = _multiply(sent_PM, plan, expert_J, group_J, experts)
    weight_1TK = weight_GSK.reshape(1, G * S, K)
    return combine(done_PM[None].astype(x_GSM.dtype), weight_1TK, plan.slots).reshape(x_GSM.shape)


def _over_devices(
    E: int,
    C: int,
    rows: int,
    axes: tuple[str, ...],
    x_GSM,
    expert_GSK,
    position_GSK,
    weight_GSK,
    experts: Experts,
) -> Array:
    G, S, K = expert_GSK.shape
    owners = E // experts.outward.shape[0]
    sorted_, size_EG = order_by_expert(expert_GSK, position_GSK, E, C)
    P = sorted_.owner_GP.shape[1]
    # A token's choices differ.
    most = min(P, G * S * min(K, E // owners))
    a_round = rows_a_round(P, owners, most)
    trip = trip_of(size_EG, owners, a_round, axes)
    # The experts' type is what travels: half the bytes in bfloat16.
    x_1TM = x_GSM.astype(experts.outward.dtype).reshape(1, G * S, -1)
    work = functools.partial(_on_those_that_came, rows)
    done_PM = travel(send(x_1TM, sorted_)[0], experts, trip, work, a_round, most, axes)
    weight_1TK = weight_GSK.reshape(1, G * S, K)
    return combine(done_PM[None].astype(x_GSM.dtype), weight_1TK, sorted_).reshape(x_GSM.shape)


def _on_those_that_came(rows: int, experts: Experts, x_RM: Array, came: Came) -> Array:
    R = x_RM.shape[0]
    plan = blocks_of(came.expert_R, came.row_R, came.size_E, R, rows)
    sent_PM = send(x_RM[None], plan.slots)[0]
    done_PM = _multiply(sent_PM, plan, came.expert_R, came.group_R, experts)
    return fetch(done_PM[None], plan.slots)[0]


def _multiply(
    sent_PM: Array, plan: Blocks, expert_J: Array, group_J: Array, experts: Experts
) -> Array:
    """The experts' results for the rows of blocks."""
    N = plan.expert_N.shape[0]

    def spread(keep_EG1F: Array) -> Array:
        choice_P = jnp.minimum(plan.slots.owner_GP[0], expert_J.shape[0] - 1)
        return keep_EG1F[expert_J[choice_P], group_J[choice_P], 0].reshape(
            N, -1, keep_EG1F.shape[-1]
        )

    product = functools.partial(block_product, expert_N=plan.expert_N, count=plan.count)
    done_NbM = experts(sent_PM.reshape(N, -1, sent_PM.shape[-1]), product=product, spread=spread)
    return done_NbM.reshape(sent_PM.shape)

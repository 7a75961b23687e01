"""Choices sorted by expert in blocks of rows; only blocks with rows are multiplied.

This is the dropless MoE of MegaBlocks (arXiv 2211.15841), for plans whose capacity is that of the
worst case: shapes are fixed, the work is that of the choices. A block has rows of one expert, so a
row meets no other expert's matrices, and a product has the same shape whatever the routing does: a
row's result does not depend on its neighbours, to the last bit. Other plans' slots are respected: a
choice without one contributes nothing. Rows are moved as in `gather`.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from m4.model.dispatch.gather import Slots, combine, fetch, send
from m4.model.dispatch.grouped_matmul import grouped_matmul
from m4.model.dispatch.over_devices import by_expert_shards, by_own_groups, experts_over
from m4.model.dispatch.ragged import order_by_expert
from m4.model.dispatch.row_exchange import Received, exchange, plan_exchange, rows_a_round
from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.settings import configurable

_FEWEST, _MOST = 4, 128  # rows of a block
FEWEST_OVER_DEVICES = 8  # the fewest rows that a TPU reads at once


class Blocks(NamedTuple):
    """The places of J choices in N blocks of b rows."""

    slots: Slots  # choices to rows and back, with all groups as one
    expert_N: Array  # The expert of each block; E for blocks without rows.
    count: Array  # Number of blocks with rows; they come first.


def rows_of_block(choices: int, num_experts: int, fewest: int = _FEWEST) -> int:
    """Returns b, a power of 2: about half of an expert's rows when balanced, up to 16 about all.

    It is at least `fewest`, or 8 where an expert has 4 rows or more, and at most 128. Measured on
    CPUs: smaller blocks read matrices too often, larger ones have too many empty rows.
    """
    rows = max(choices // num_experts, 1)
    half = 2 ** max(rows.bit_length() - 2, 0)
    least = fewest if rows < 4 else max(fewest, 8)
    return min(max(half, min(2 * half, 16), least), _MOST)


def most_blocks(choices: int, num_experts: int, rows: int) -> int:
    """Returns N, enough for any routing: each expert's last block may be nearly empty."""
    return -(-choices // rows) + min(num_experts, choices)


def blocks_of(expert_J: Array, row_J: Array, size_E: Array, most: int, rows: int) -> Blocks:
    """Cuts the rows of choices, at most `most`, in blocks of `rows`.

    Args:
        row_J: The choice's number in the order of experts; -1 without a row.
        size_E: Number of rows of each expert.
    """
    J, E = expert_J.shape[0], size_E.shape[0]
    N = most_blocks(most, E, rows)
    blocks_E = -(-size_E // rows)
    end_E = jnp.cumsum(blocks_E)
    expert_N = jnp.sum(jnp.arange(N, dtype=jnp.int32)[:, None] >= end_E[None], axis=1)
    # An expert's rows move so that the first one begins its first block.
    moved_E = (end_E - blocks_E) * rows - (jnp.cumsum(size_E) - size_E)
    row_J = jnp.where(row_J >= 0, row_J + moved_E[expert_J], N * rows)
    choice_J = jnp.arange(J, dtype=jnp.int32)
    owner_P = jnp.full((N * rows,), J, jnp.int32).at[row_J].set(choice_J, mode="drop")
    return Blocks(Slots(owner_P[None], row_J[None]), expert_N, end_E[-1])


@configurable
def dropless(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens in blocks of rows of one expert.

    Where experts are sharded, rows travel to the devices of their experts (`row_exchange`).
    Otherwise each device sorts its own groups; groups that do not divide over the devices are
    worked on by all of them.
    """
    axes = experts_over("dropless", x_GSM, routing)
    E, C = routing.num_experts, routing.capacity
    if not axes:
        return by_own_groups(functools.partial(_on_a_device, E, C), x_GSM, routing, experts)
    rows = rows_of_block(routing.expert_GSK.size, E, FEWEST_OVER_DEVICES)
    on_a_device = functools.partial(_with_exchange, E, C, rows, axes)
    return by_expert_shards(on_a_device, x_GSM, routing, experts)


def _on_a_device(E: int, C: int, x_GSM, expert_GSK, position_GSK, weight_GSK, experts) -> Array:
    G, S, K = expert_GSK.shape
    expert_J = expert_GSK.reshape(-1)
    group_J = jnp.arange(G * S * K) // (S * K)
    in_order, size_EG = order_by_expert(expert_GSK, position_GSK, E, C)
    row_J = jnp.where(position_GSK.reshape(-1) >= 0, in_order.slot_GJ[0], -1)
    rows = rows_of_block(G * S * K, E)
    blocks = blocks_of(expert_J, row_J, jnp.sum(size_EG, axis=1), in_order.owner_GP.shape[1], rows)
    sent_PM = send(x_GSM.reshape(1, G * S, -1), blocks.slots)[0]
    done_PM = _multiply(sent_PM, blocks, expert_J, group_J, experts)
    weight_1TK = weight_GSK.reshape(1, G * S, K)
    return combine(done_PM[None].astype(x_GSM.dtype), weight_1TK, blocks.slots).reshape(x_GSM.shape)


def _with_exchange(
    E: int, C: int, rows: int, axes: tuple[str, ...],
    x_GSM, expert_GSK, position_GSK, weight_GSK, experts,
) -> Array:  # fmt: skip
    G, S, K = expert_GSK.shape
    owners = E // experts.outward.shape[0]
    in_order, size_EG = order_by_expert(expert_GSK, position_GSK, E, C)
    P = in_order.owner_GP.shape[1]
    # A token's choices differ, so that one owner gets at most as many as it has experts.
    most = min(P, G * S * min(K, E // owners))
    a_round = rows_a_round(P, owners, most)
    plan = plan_exchange(size_EG, owners, a_round, axes)
    # Rows travel in the experts' type: half the bytes in bfloat16.
    x_1TM = x_GSM.astype(experts.outward.dtype).reshape(1, G * S, -1)
    work = functools.partial(_on_received_rows, rows)
    done_PM = exchange(send(x_1TM, in_order)[0], experts, plan, work, a_round, most, axes)
    weight_1TK = weight_GSK.reshape(1, G * S, K)
    return combine(done_PM[None].astype(x_GSM.dtype), weight_1TK, in_order).reshape(x_GSM.shape)


def _on_received_rows(rows: int, experts: Experts, x_RM: Array, received: Received) -> Array:
    R = x_RM.shape[0]
    blocks = blocks_of(received.expert_R, received.row_R, received.size_E, R, rows)
    sent_PM = send(x_RM[None], blocks.slots)[0]
    done_PM = _multiply(sent_PM, blocks, received.expert_R, received.group_R, experts)
    return fetch(done_PM[None], blocks.slots)[0]


def _multiply(
    sent_PM: Array, blocks: Blocks, expert_J: Array, group_J: Array, experts: Experts
) -> Array:
    N = blocks.expert_N.shape[0]

    def spread(keep_EG1F: Array) -> Array:
        choice_P = jnp.minimum(blocks.slots.owner_GP[0], expert_J.shape[0] - 1)
        keep_PF = keep_EG1F[expert_J[choice_P], group_J[choice_P], 0]
        return keep_PF.reshape(N, -1, keep_PF.shape[-1])

    product = functools.partial(grouped_matmul, expert_N=blocks.expert_N, count=blocks.count)
    done_NbM = experts(sent_PM.reshape(N, -1, sent_PM.shape[-1]), product=product, spread=spread)
    return done_NbM.reshape(sent_PM.shape)

"""Choices sorted by expert in blocks of rows, and a loop over the blocks that are there.

For plans that drop nothing, whose capacity is that of the worst case (MegaBlocks, arXiv
2211.15841): shapes are fixed, the work is that of the choices. A block has rows of one expert, so a
row meets no other expert's matrices, and a product has the same shape whatever the routing does: a
row's result does not depend on the rows next to it, to the last bit. A plan's slots are respected
all the same: a choice without one contributes nothing. Moving rows is `gather`'s.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m4.model.dispatch.all_to_all import back, by_exchange, there
from m4.model.dispatch.gather import Slots, combine, send
from m4.model.dispatch.ragged import by_own_groups, order_by_expert
from m4.model.experts import Experts
from m4.model.product import input_gradient, weight_gradient
from m4.model.routing import Array, Routing
from m4.settings import configurable

_FEWEST, _MOST = 4, 128  # rows of a block


class Blocks(NamedTuple):
    """Where rows lie. N blocks of b rows; J = G*S*K choices.

    slots: choices to rows and back, all groups as one. expert_N: the expert of each block, E for
    those that are not there. count: how many are there, the first ones.
    """

    slots: Slots
    expert_N: Array
    count: Array


def rows_of_block(choices: int, num_experts: int) -> int:
    """b: half of an expert's rows where all have as many, a power of 2. Measured on CPUs: smaller
    blocks read an expert's matrices too often, larger ones have too many empty rows."""
    half = max(choices // num_experts, 1).bit_length() - 2
    return min(max(2 ** max(half, 0), _FEWEST), _MOST)


def most_blocks(choices: int, num_experts: int, rows: int) -> int:
    """N: enough for any routing, as each expert's last block may be all but empty."""
    return -(-choices // rows) + min(num_experts, choices)


def blocks_of(
    expert_GSK: Array, position_GSK: Array, num_experts: int, capacity: int, rows: int
) -> Blocks:
    """The blocks of a plan: experts in their order, each one's rows by group and slot."""
    G, S, K = expert_GSK.shape
    J, E = G * S * K, num_experts
    compact, size_E = order_by_expert(expert_GSK, position_GSK, E, capacity)
    N = most_blocks(min(J, E * G * capacity), E, rows)
    blocks_E = -(-size_E // rows)
    end_E = jnp.cumsum(blocks_E)
    expert_N = jnp.sum(jnp.arange(N, dtype=jnp.int32)[:, None] >= end_E[None], axis=1)
    # What an expert's first row is moved by: to the beginning of its first block.
    moved_E = (end_E - blocks_E) * rows - (jnp.cumsum(size_E) - size_E)
    row_J = compact.slot_GJ[0]
    has_J = position_GSK.reshape(J) >= 0
    row_J = jnp.where(has_J, row_J + moved_E[expert_GSK.reshape(J)], N * rows)
    choice_J = jnp.arange(J, dtype=jnp.int32)
    owner_P = jnp.full((N * rows,), J, jnp.int32).at[row_J].set(choice_J, mode="drop")
    return Blocks(Slots(owner_P[None], row_J[None]), expert_N, end_E[-1])


@configurable
def blocks(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """The same result as `einsum`.

    Where experts are sharded their slots are exchanged as by `all_to_all`, and each device
    multiplies those that have a token. Without an expert axis each device sorts its own groups;
    groups that do not divide over the devices are worked on by all of them.

    Raises:
        ValueError: groups or experts that do not divide over the devices of an expert axis.
    """
    G, S, K = routing.expert_GSK.shape
    rows = rows_of_block(G * S * K, routing.num_experts)
    work = functools.partial(_on_taken_slots, rows)
    return by_exchange(
        "blocks", x_GSM, routing, experts, there, back, work=work, alone=_on_own_groups
    )


def _on_own_groups(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    E, C = routing.num_experts, routing.capacity

    def on_a_device(x_GSM, expert_GSK, position_GSK, weight_GSK, experts):
        G, S, K = expert_GSK.shape
        group_J = jnp.arange(G * S * K) // (S * K)
        rows = rows_of_block(G * S * K, E)
        plan = blocks_of(expert_GSK, position_GSK, E, C, rows)
        sent_PM = send(x_GSM.reshape(1, G * S, -1), plan.slots)[0]
        done_PM = _multiply(sent_PM, plan, expert_GSK.reshape(-1), group_J, experts)
        weight_1TK = weight_GSK.reshape(1, G * S, K)
        return combine(done_PM[None].astype(x_GSM.dtype), weight_1TK, plan.slots).reshape(
            x_GSM.shape
        )

    return by_own_groups(on_a_device, x_GSM, routing, experts)


def _on_taken_slots(rows: int, experts: Experts, sent_EGCM: Array, taken_EGC1: Array) -> Array:
    """As if each slot were a token with one choice, the slot's expert."""
    E, G, C, M = sent_EGCM.shape
    P = E * G * C
    slot_P = jnp.arange(P, dtype=jnp.int32)
    expert_P, group_P = slot_P // (G * C), slot_P // C % G
    position_P = jnp.where(taken_EGC1.reshape(P), slot_P % (G * C), -1)
    plan = blocks_of(expert_P.reshape(1, P, 1), position_P.reshape(1, P, 1), E, G * C, rows)
    sent_PM = send(sent_EGCM.reshape(1, P, M), plan.slots)[0]
    done_PM = _multiply(sent_PM, plan, expert_P, group_P, experts)
    ones_1P1 = jnp.ones((1, P, 1), done_PM.dtype)
    return combine(done_PM[None], ones_1P1, plan.slots).reshape(sent_EGCM.shape)


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


# A batch of them, such as the rows of a Jacobian, is a loop: `lax.ragged_dot` has no other.
_in_a_loop = jax.custom_batching.sequential_vmap


@jax.custom_vjp
def block_product(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    """Each block times its expert's matrix: [N, b, F]; 0 in blocks from `count` on.

    On CPUs a loop of `count` turns; elsewhere `lax.ragged_dot`, which the compilers for TPUs make a
    grouped product of.
    """
    return lax.platform_dependent(x_NbM, w_EMF, expert_N, count, cpu=_loop, default=_grouped)


def _forward(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array):
    return block_product(x_NbM, w_EMF, expert_N, count), (x_NbM, w_EMF, expert_N, count)


def _backward(saved, d_NbF: Array):
    d_x_NbM, d_w_EMF = lax.platform_dependent(
        *saved, d_NbF, cpu=_loop_backward, default=_grouped_backward
    )
    return d_x_NbM, d_w_EMF, None, None


block_product.defvjp(_forward, _backward)


def _loop(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    N, b, _ = x_NbM.shape

    def turn(n: Array, y_NbF: Array) -> Array:
        return _put(y_NbF, jnp.dot(_at(x_NbM, n), _at(w_EMF, expert_N[n])), n)

    return lax.fori_loop(0, count, turn, _zeros((N, b, w_EMF.shape[-1]), x_NbM))


def _loop_backward(
    x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array, d_NbF: Array
) -> tuple[Array, Array]:
    def turn(n: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        d_x_NbM, d_w_EMF = sums
        e = expert_N[n]
        d_bF = _at(d_NbF, n)
        d_w_MF = _at(d_w_EMF, e) + weight_gradient(_at(x_NbM, n), d_bF)
        return _put(d_x_NbM, input_gradient(d_bF, _at(w_EMF, e)), n), _put(d_w_EMF, d_w_MF, e)

    start = (_zeros(x_NbM.shape, x_NbM), _zeros(w_EMF.shape, w_EMF))
    return lax.fori_loop(0, count, turn, start)


@_in_a_loop
def _grouped(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    del count  # blocks that are not there have no expert
    return _ragged(x_NbM, w_EMF, expert_N)


def _ragged(x_NbM: Array, w_EMF: Array, expert_N: Array) -> Array:
    N, b, M = x_NbM.shape
    E, F = w_EMF.shape[0], w_EMF.shape[-1]
    size_E = b * jnp.sum(expert_N[:, None] == jnp.arange(E)[None], axis=0)
    y_PF = lax.ragged_dot(x_NbM.reshape(N * b, M), w_EMF, size_E.astype(jnp.int32))
    # What a ragged product gives for rows outside every expert's is left open.
    return jnp.where((expert_N < E)[:, None, None], y_PF.reshape(N, b, F), 0)


@_in_a_loop
def _grouped_backward(
    x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array, d_NbF: Array
) -> tuple[Array, Array]:
    del count
    there_N11 = (expert_N < w_EMF.shape[0])[:, None, None]
    _, gradients = jax.vjp(lambda x, w: _ragged(x, w, expert_N), x_NbM, w_EMF)
    d_x_NbM, d_w_EMF = gradients(jnp.where(there_N11, d_NbF, 0))
    return jnp.where(there_N11, d_x_NbM, 0), d_w_EMF


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Of the type of `like`: in a manual region a loop's state must vary over the same axes from
    the start, which a constant does not."""
    return jnp.broadcast_to(jnp.where(False, like[(0,) * like.ndim], 0), shape)


def _at(array: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _put(array: Array, part: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(array, part, index, 0)


block_product.defvjp(_forward, _backward)

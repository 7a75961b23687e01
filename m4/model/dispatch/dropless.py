"""Transport that sorts choices by expert into blocks of rows, and multiplies only full blocks.

This is the dropless MoE of MegaBlocks (arXiv 2211.15841), for plans with worst-case capacity:
shapes are fixed, and the work is that of the choices. A product has the same shape for any routing,
so a row's result does not depend on its neighbours, to the last bit. In other plans, a choice
without a slot contributes nothing. Rows are moved as in `gather`.

If experts are sharded, rows go to the devices of their experts and back, after their counts. In a
round, every device sends at most W rows to each owner of experts, which computes and returns them.
The number of rounds follows at run time from the largest number of rows between two devices.
Nothing is dropped, and the buffers hold twice the rows of a balanced routing, not all rows of all
devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m4.model.dispatch import by_groups, experts_over
from m4.model.dispatch.gather import Slots, combine, fetch, send
from m4.model.dispatch.grouped_matmul import grouped_matmul, zeros_as
from m4.model.dispatch.ragged import order_by_expert
from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.parallel.mesh import split_axes
from m4.settings import configurable

_FEWEST, _MOST = 4, 128  # rows of a block
FEWEST_OVER_DEVICES = 8  # minimum rows that a TPU reads at once
# A round's buffer has _SPARE times the rows of a balanced routing, and at least this many.
_SPARE, _FEWEST_A_ROUND = 2, 512
# Name of the loop over rounds in a compiled program; a balanced routing needs one round.
ROUNDS = "rounds_of_rows"


class Blocks(NamedTuple):
    """Places of J choices in N blocks of b rows."""

    slots: Slots  # choices to rows and back, with all groups joined
    expert_N: Array  # The expert of each block; E for blocks without rows.
    count: Array  # Number of blocks with rows; they come first.


class ExchangePlan(NamedTuple):
    """Plan of an exchange among X owners with E experts each, from one device's view."""

    start_X: Array  # first row for each owner
    size_X: Array  # number of rows for each owner
    here_X: Array  # first row for this device, on each device
    received_XEG: Array  # number of rows from each device for each expert here and group
    rounds: Array  # number of rounds, the same on all devices


class Received(NamedTuple):
    """R = X*W rows that a device receives in a round."""

    expert_R: Array  # the row's expert among this device's E
    row_R: Array  # The row's number in the order of experts, or -1 without a row.
    group_R: Array  # the sending device and its group, in [0, X*G)
    size_E: Array  # number of rows of each expert


def rows_of_block(choices: int, num_experts: int, fewest: int = _FEWEST) -> int:
    """Returns b, a power of 2: about half of an expert's balanced rows, or all of up to 16.

    It is at least `fewest`, or 8 if an expert has 4 rows or more, and at most 128. On CPUs, smaller
    blocks were measured to read matrices too often, and larger ones to have too many empty rows.
    """
    rows = max(choices // num_experts, 1)
    half = 2 ** max(rows.bit_length() - 2, 0)
    least = fewest if rows < 4 else max(fewest, 8)
    return min(max(half, min(2 * half, 16), least), _MOST)


def most_blocks(choices: int, num_experts: int, rows: int) -> int:
    """Returns N, enough for any routing, as each expert's last block may be nearly empty."""
    return -(-choices // rows) + min(num_experts, choices)


def blocks_of(expert_J: Array, row_J: Array, size_E: Array, most: int, rows: int) -> Blocks:
    """Divides the rows of choices, at most `most`, into blocks of `rows`.

    Args:
        row_J: The choice's number in the order of experts, or -1 without a row.
        size_E: Number of rows of each expert.
    """
    J, E = expert_J.shape[0], size_E.shape[0]
    N = most_blocks(most, E, rows)
    blocks_E = -(-size_E // rows)
    end_E = jnp.cumsum(blocks_E)
    expert_N = jnp.sum(jnp.arange(N, dtype=jnp.int32)[:, None] >= end_E[None], axis=1)
    # An expert's rows move so that they begin a block.
    moved_E = (end_E - blocks_E) * rows - (jnp.cumsum(size_E) - size_E)
    row_J = jnp.where(row_J >= 0, row_J + moved_E[expert_J], N * rows)
    choice_J = jnp.arange(J, dtype=jnp.int32)
    owner_P = jnp.full((N * rows,), J, jnp.int32).at[row_J].set(choice_J, mode="drop")
    return Blocks(Slots(owner_P[None], row_J[None]), expert_N, end_E[-1])


@configurable
def dropless(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens in blocks of rows, each for one expert.

    Rows travel to sharded experts; otherwise each device sorts its own groups.
    """
    axes = experts_over("dropless", x_GSM, routing)
    E, C = routing.num_experts, routing.capacity
    on_a_device = functools.partial(_on_a_device, E, C)
    if axes:
        rows = rows_of_block(routing.expert_GSK.size, E, FEWEST_OVER_DEVICES)
        on_a_device = functools.partial(_with_exchange, E, C, rows, axes)
    return by_groups(on_a_device, x_GSM, routing, experts, own=bool(axes))


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
    # A token's choices differ, so one owner gets at most as many as it has experts.
    most = min(P, G * S * min(K, E // owners))
    W = min(most, -(-max(_SPARE * P, _FEWEST_A_ROUND) // owners))
    plan = _plan_exchange(size_EG, owners, W, axes)

    def one_round(number: Any, x_PM: Array, experts: Experts, plan: ExchangePlan) -> Array:
        """Returns the results of one round's rows, and 0 for the others."""
        there, back = _exchanges(number * W, W, plan, P, axes)
        received = _received(number * W, W, plan.received_XEG)
        return back(_on_received_rows(rows, experts, there(x_PM), received))

    # Rows travel in the experts' type: half the bytes in bfloat16.
    x_PM = send(x_GSM.astype(experts.outward.dtype).reshape(1, G * S, -1), in_order)[0]
    run = functools.partial(one_round, 0) if most <= W else functools.partial(_rounds, one_round)
    done_1PM = run(x_PM, experts, plan)[None].astype(x_GSM.dtype)
    return combine(done_1PM, weight_GSK.reshape(1, G * S, K), in_order).reshape(x_GSM.shape)


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


# --- The exchange of rows, inside a manual region over the experts' mesh axes ---------------------


def _plan_exchange(size_EG: Array, owners: int, W: int, axes: tuple[str, ...]) -> ExchangePlan:
    """Exchanges the counts, size_EG: this device's rows for each of all experts, by group."""
    size_XEG = size_EG.reshape(owners, -1, size_EG.shape[1])
    size_X = jnp.sum(size_XEG, axis=(1, 2))
    start_X = jnp.cumsum(size_X) - size_X
    sent_XN = jnp.concatenate([start_X[:, None], size_XEG.reshape(owners, -1)], axis=1)
    received_XN = lax.all_to_all(sent_XN, axes, split_axis=0, concat_axis=0, tiled=True)
    everywhere = split_axes(jax.sharding.get_abstract_mesh(), "batch")
    rounds = -(-lax.pmax(jnp.max(size_X), everywhere) // W)
    received_XEG = received_XN[:, 1:].reshape(size_XEG.shape)
    return ExchangePlan(start_X, size_X, received_XN[:, 0], received_XEG, rounds)


def _exchanges(first: Any, W: int, plan: ExchangePlan, P: int, axes: tuple[str, ...]):
    """Returns the exchanges of the rows from `first` on: [P, M] -> [X*W, M], and back."""
    X = plan.size_X.shape[0]
    received_X = jnp.sum(plan.received_XEG, axis=(1, 2))
    place_X = W * jnp.arange(X, dtype=jnp.int32)

    def now(size_X: Array) -> Array:
        return jnp.clip(size_X - first, 0, W)

    # CPUs have no ragged exchange, so each pair of devices sends W rows.
    def ragged(x: Array, rows: int, start_X: Array, size_X: Array, to_X: Array, received_X: Array):
        zeros = zeros_as((rows, x.shape[-1]), x)
        sizes = start_X, now(size_X), to_X, now(received_X)
        return lax.ragged_all_to_all(x, zeros, *sizes, axis_name=axes)

    def exchanged(x: Array) -> Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    here_X = jnp.full((X,), W, jnp.int32) * lax.axis_index(axes)
    slots = _slots(first, W, plan, P)

    def there(x_PM: Array) -> Array:
        sizes = plan.start_X + first, plan.size_X, here_X, received_X
        return lax.platform_dependent(
            x_PM,
            cpu=lambda x: exchanged(send(x[None], slots)[0]),
            default=lambda x: ragged(x, X * W, *sizes),
        )

    def back(y_RM: Array) -> Array:
        return lax.platform_dependent(
            y_RM,
            cpu=lambda y: fetch(exchanged(y)[None], slots)[0],
            default=lambda y: ragged(y, P, place_X, received_X, plan.here_X + first, plan.size_X),
        )

    return there, back


def _slots(first: Any, W: int, plan: ExchangePlan, P: int) -> Slots:
    X = plan.size_X.shape[0]
    number_W = first + jnp.arange(W, dtype=jnp.int32)
    owner_XW = plan.start_X[:, None] + number_W[None]
    owner_XW = jnp.where(number_W[None] < plan.size_X[:, None], owner_XW, P)
    row_P = jnp.arange(P, dtype=jnp.int32)
    end_X = plan.start_X + plan.size_X
    to_P = jnp.sum(row_P[:, None] >= end_X[None], axis=1)
    place_P = row_P - plan.start_X.at[to_P].get(mode="clip") - first
    now_P = (to_P < X) & (place_P >= 0) & (place_P < W)
    slot_P = jnp.where(now_P, to_P * W + place_P, X * W)
    return Slots(owner_XW.reshape(1, X * W), slot_P[None])


def _received(first: Any, W: int, received_XEG: Array) -> Received:
    X, E, G = received_XEG.shape
    end_XA = jnp.clip(jnp.cumsum(received_XEG.reshape(X, E * G), axis=1) - first, 0, W)
    end_XE = end_XA[:, G - 1 :: G]
    size_XE = jnp.diff(end_XE, axis=1, prepend=0)
    size_E = jnp.sum(size_XE, axis=0)
    # An expert's rows are in the order of the sending devices.
    begin_XE = (jnp.cumsum(size_E) - size_E)[None] + jnp.cumsum(size_XE, axis=0) - size_XE
    place_W = jnp.arange(W, dtype=jnp.int32)
    # The number of (expert, group) cells that end before a row is its own cell's number.
    cell_XW = jnp.sum(place_W[None, :, None] >= end_XA[:, None], axis=-1)
    expert_XW = jnp.minimum(cell_XW // G, E - 1)
    moved_XE = begin_XE - (end_XE - size_XE)
    row_XW = place_W[None] + jnp.take_along_axis(moved_XE, expert_XW, axis=1)
    row_XW = jnp.where(cell_XW < E * G, row_XW, -1)
    group_XW = jnp.arange(X)[:, None] * G + cell_XW % G
    return Received(expert_XW.reshape(-1), row_XW.reshape(-1), group_XW.reshape(-1), size_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounds(one: Callable[..., Array], x_PM: Array, experts: Any, plan: ExchangePlan) -> Array:

    def turn(number: Array, y_PM: Array) -> Array:
        return y_PM + one(number, x_PM, experts, plan)

    with jax.named_scope(ROUNDS):
        return lax.fori_loop(0, plan.rounds, turn, zeros_as(x_PM.shape, x_PM))


def _backward(one: Callable[..., Array], saved: Any, d_PM: Array):
    """Repeats each round, as no buffer can keep the results of an unknown number of rounds."""
    x_PM, experts, plan = saved

    def turn(number: Array, sums: Any) -> Any:
        _, gradients = jax.vjp(lambda x, w: one(number, x, w, plan), x_PM, experts)
        return jax.tree.map(jnp.add, sums, gradients(d_PM))

    zeros = jax.tree.map(lambda like: zeros_as(like.shape, like), (x_PM, experts))
    with jax.named_scope(ROUNDS):
        return *lax.fori_loop(0, plan.rounds, turn, zeros), None


_rounds.defvjp(lambda one, *given: (_rounds(one, *given), given), _backward)

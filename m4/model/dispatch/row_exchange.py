"""Rows go to the devices of their experts and back: counts first, then rows.

All of it is inside a manual region over the experts' mesh axes. Each device has its rows in the
order of their experts, so that the rows for one device, the owner of these experts, lie together.
In a round every device sends at most W rows to each owner, which works on the rows that it received
and sends the results back. The number of rounds follows, while the program runs, from the largest
number of rows between two devices: nothing is dropped, and the buffers hold twice the rows of a
balanced routing, not all rows of all devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m4.model.dispatch.gather import Slots, fetch, send
from m4.model.dispatch.grouped_matmul import zeros_as
from m4.parallel.mesh import split_axes

Array = jax.Array

# A device receives _SPARE times the rows of a balanced routing in a round, and at least _FEWEST.
_SPARE, _FEWEST = 2, 512
# Name of the loop in a compiled program, where a balanced routing needs one round.
ROUNDS = "rounds_of_rows"


class ExchangePlan(NamedTuple):
    """Plan of an exchange among X owners with E experts each, seen from one device."""

    start_X: Array  # first row for each owner
    size_X: Array  # number of rows for each owner
    here_X: Array  # first row for this device, on each device
    received_XEG: Array  # number of rows from each device for each expert here and group
    rounds: Array  # number of rounds, the same on all devices


class Received(NamedTuple):
    """The R = X*W rows that a device receives in a round."""

    expert_R: Array  # the row's expert among this device's E
    row_R: Array  # The row's number in the order of experts; -1 where there is no row.
    group_R: Array  # the sending device and its group, in [0, X*G)
    size_E: Array  # number of rows of each expert


# (experts, rows [R, M], Received) -> results [R, M].
Work = Callable[[Any, Array, Received], Array]


def rows_a_round(rows: int, owners: int, most: int) -> int:
    """Returns W, the most rows from one device to one of X owners in a round.

    `rows` is the most rows that a device has, `most` the most that it has for one owner.
    """
    return min(most, -(-max(_SPARE * rows, _FEWEST) // owners))


def plan_exchange(size_EG: Array, owners: int, a_round: int, axes: tuple[str, ...]) -> ExchangePlan:
    """Exchanges the counts, size_EG: this device's rows for each of all experts, by group."""
    size_XEG = size_EG.reshape(owners, -1, size_EG.shape[1])
    size_X = jnp.sum(size_XEG, axis=(1, 2))
    start_X = jnp.cumsum(size_X) - size_X
    sent_XN = jnp.concatenate([start_X[:, None], size_XEG.reshape(owners, -1)], axis=1)
    received_XN = lax.all_to_all(sent_XN, axes, split_axis=0, concat_axis=0, tiled=True)
    everywhere = split_axes(jax.sharding.get_abstract_mesh(), "batch")
    rounds = -(-lax.pmax(jnp.max(size_X), everywhere) // a_round)
    received_XEG = received_XN[:, 1:].reshape(size_XEG.shape)
    return ExchangePlan(start_X, size_X, received_XN[:, 0], received_XEG, rounds)


def exchange(
    x_PM: Array,
    experts: Any,
    plan: ExchangePlan,
    work: Work,
    a_round: int,
    most: int,
    axes: tuple[str, ...],
) -> Array:
    """Returns the results of the owners' work, [P, M].

    Rows are in the order of experts; those that `plan` does not count get 0. `experts` are this
    device's; W is `a_round`, and `most` that of `rows_a_round`.
    """

    def one(number: Any, x_PM: Array, experts: Any, plan: ExchangePlan) -> Array:
        """Returns the results of one round's rows; 0 for the others."""
        first = number * a_round
        there, back = _exchanges(first, a_round, plan, x_PM.shape[0], axes)
        return back(work(experts, there(x_PM), _received(first, a_round, plan.received_XEG)))

    if a_round >= most:
        return one(0, x_PM, experts, plan)
    return _rounds(one, x_PM, experts, plan)


def _exchanges(first: Any, W: int, plan: ExchangePlan, P: int, axes: tuple[str, ...]):
    """Returns the exchanges of the rows from `first` on: [P, M] -> [X*W, M], and back.

    On TPUs and GPUs they are ragged. CPUs have no such exchange: each pair of devices sends W rows.
    """
    X = plan.size_X.shape[0]
    received_X = jnp.sum(plan.received_XEG, axis=(1, 2))
    place_X = W * jnp.arange(X, dtype=jnp.int32)

    def now(size_X: Array) -> Array:
        return jnp.clip(size_X - first, 0, W)

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


def _forward(one: Callable[..., Array], x_PM: Array, experts: Any, plan: ExchangePlan):
    return _rounds(one, x_PM, experts, plan), (x_PM, experts, plan)


def _backward(one: Callable[..., Array], saved: Any, d_PM: Array):
    """Repeats each round: as their number is not known, no buffer could keep what they did."""
    x_PM, experts, plan = saved

    def turn(number: Array, sums: Any) -> Any:
        _, gradients = jax.vjp(lambda x, w: one(number, x, w, plan), x_PM, experts)
        return jax.tree.map(jnp.add, sums, gradients(d_PM))

    zeros = jax.tree.map(lambda like: zeros_as(like.shape, like), (x_PM, experts))
    with jax.named_scope(ROUNDS):
        return *lax.fori_loop(0, plan.rounds, turn, zeros), None


_rounds.defvjp(_forward, _backward)

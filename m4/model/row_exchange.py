"""Rows travel to the devices of their experts and back: counts first, then rows.

In a manual region over the mesh axes of the experts. Each device has rows in the order of their
experts, so those for one device (the owner of these experts) lie together. In a round every device
sends at most W rows to each owner, which works on those that came and sends the results back. How
many rounds there are is decided by the largest number of rows between two devices while the
program runs: nothing is dropped, and the buffers hold twice the rows of a balanced routing, not all
rows of all devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m4.model.block_product import zeros_as
from m4.model.dispatch.gather import Slots, fetch, send
from m4.parallel.mesh import split_axes

Array = jax.Array

# Rows that a device receives in a round: so many times those of a balanced routing, and at least
# _FEWEST in all.
_SPARE, _FEWEST = 2, 512
ROUNDS = "rounds_of_rows"  # of the loop in a compiled program: a balanced routing has one round


class Trip(NamedTuple):
    """Whose rows go where. X owners with e experts each; P rows on this device, G groups.

    start_X, size_X: the rows for each owner begin and how many there are. here_X: where those for
    this device begin on each device. came_XEG: how many rows come from each device for each expert
    and group, [X, e, G]. rounds: how many, the same on all devices.
    """

    start_X: Array
    size_X: Array
    here_X: Array
    came_XEG: Array
    rounds: Array


class Came(NamedTuple):
    """The rows R = X*W that came in a round.

    expert_R: of this device's, in [0, e). row_R: the row's number in the order of experts; -1 where
    none came. group_R: the device and its group, in [0, X*G). size_E: rows of each expert.
    """

    expert_R: Array
    row_R: Array
    group_R: Array
    size_E: Array


# (experts, rows [R, M], Came) -> results [R, M].
Work = Callable[[Any, Array, Came], Array]


def rows_a_round(rows: int, owners: int, most: int) -> int:
    """W. rows: that a device has at most; most: that it can have for one owner."""
    return min(most, -(-max(_SPARE * rows, _FEWEST) // owners))


def trip_of(size_EG: Array, owners: int, a_round: int, axes: tuple[str, ...]) -> Trip:
    """The exchange of counts. size_EG: of all experts. axes: the experts', of the mesh."""
    size_XEG = size_EG.reshape(owners, -1, size_EG.shape[1])
    size_X = jnp.sum(size_XEG, axis=(1, 2))
    start_X = jnp.cumsum(size_X) - size_X
    sent_XN = jnp.concatenate([start_X[:, None], size_XEG.reshape(owners, -1)], axis=1)
    came_XN = lax.all_to_all(sent_XN, axes, split_axis=0, concat_axis=0, tiled=True)
    everywhere = split_axes(jax.sharding.get_abstract_mesh(), "batch")
    rounds = -(-lax.pmax(jnp.max(size_X), everywhere) // a_round)
    came_XEG = came_XN[:, 1:].reshape(size_XEG.shape)
    return Trip(start_X, size_X, came_XN[:, 0], came_XEG, rounds)


def travel(
    x_PM: Array,
    experts: Any,
    trip: Trip,
    work: Work,
    a_round: int,
    most: int,
    axes: tuple[str, ...],
) -> Array:
    """The results of the owners' work [P, M], for rows in the order of experts; 0 for the rows
    after those that `trip` counts.

    experts: a tree; its arrays of numbers get gradients. a_round: W. most: see `rows_a_round`.
    """
    one = functools.partial(_round, work, a_round, axes)
    if a_round >= most:
        return one(0, x_PM, experts, trip)
    return _rounds(one, x_PM, experts, trip)


def _round(
    work: Work, W: int, axes: tuple[str, ...], number: Any, x_PM: Array, experts: Any, trip: Trip
) -> Array:
    """The results of the rows of a round; 0 for the others."""
    there, back = _exchanges(number * W, W, trip, x_PM.shape[0], axes)
    came = _came(number * W, W, trip.came_XEG)
    return back(work(experts, there(x_PM), came))


def _exchanges(first: Any, W: int, trip: Trip, P: int, axes: tuple[str, ...]):
    """(there: [P, M] -> [X*W, M], back: the opposite) of the rows from number `first` on.

    Ragged exchanges, which send the rows that there are, on TPUs and GPUs. CPUs have none: there
    each pair of devices exchanges W rows, whatever there are.
    """
    X = trip.size_X.shape[0]
    came_X = jnp.sum(trip.came_XEG, axis=(1, 2))
    place_X = W * jnp.arange(X, dtype=jnp.int32)

    def now(size_X: Array) -> Array:
        return jnp.clip(size_X - first, 0, W)

    def ragged(x: Array, rows: int, start_X: Array, size_X: Array, to_X: Array, came_X: Array):
        zeros = zeros_as((rows, x.shape[-1]), x)
        sizes = start_X, now(size_X), to_X, now(came_X)
        return lax.ragged_all_to_all(x, zeros, *sizes, axis_name=axes)

    def exchanged(x: Array) -> Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    here_X = jnp.full((X,), W, jnp.int32) * lax.axis_index(axes)
    slots = _slots(first, W, trip, P)

    def there(x_PM: Array) -> Array:
        return lax.platform_dependent(
            x_PM,
            cpu=lambda x: exchanged(send(x[None], slots)[0]),
            default=lambda x: ragged(x, X * W, trip.start_X + first, trip.size_X, here_X, came_X),
        )

    def back(y_RM: Array) -> Array:
        return lax.platform_dependent(
            y_RM,
            cpu=lambda y: fetch(exchanged(y)[None], slots)[0],
            default=lambda y: ragged(y, P, place_X, came_X, trip.here_X + first, trip.size_X),
        )

    return there, back


def _slots(first: Any, W: int, trip: Trip, P: int) -> Slots:
    """The rows that a round sends, W slots an owner."""
    X = trip.size_X.shape[0]
    number_W = first + jnp.arange(W, dtype=jnp.int32)
    owner_XW = trip.start_X[:, None] + number_W[None]
    owner_XW = jnp.where(number_W[None] < trip.size_X[:, None], owner_XW, P)
    row_P = jnp.arange(P, dtype=jnp.int32)
    end_X = trip.start_X + trip.size_X
    to_P = jnp.sum(row_P[:, None] >= end_X[None], axis=1)
    place_P = row_P - trip.start_X.at[to_P].get(mode="clip") - first
    now_P = (to_P < X) & (place_P >= 0) & (place_P < W)
    slot_P = jnp.where(now_P, to_P * W + place_P, X * W)
    return Slots(owner_XW.reshape(1, X * W), slot_P[None])


def _came(first: Any, W: int, came_XEG: Array) -> Came:
    X, E, G = came_XEG.shape
    end_XA = jnp.clip(jnp.cumsum(came_XEG.reshape(X, E * G), axis=1) - first, 0, W)
    end_XE = end_XA[:, G - 1 :: G]
    size_XE = jnp.diff(end_XE, axis=1, prepend=0)
    size_E = jnp.sum(size_XE, axis=0)
    # An expert's rows come device by device.
    begin_XE = (jnp.cumsum(size_E) - size_E)[None] + jnp.cumsum(size_XE, axis=0) - size_XE
    place_W = jnp.arange(W, dtype=jnp.int32)
    # Which expert and group a row is for: those before it have ended.
    cell_XW = jnp.sum(place_W[None, :, None] >= end_XA[:, None], axis=-1)
    expert_XW = jnp.minimum(cell_XW // G, E - 1)
    moved_XE = begin_XE - (end_XE - size_XE)
    row_XW = place_W[None] + jnp.take_along_axis(moved_XE, expert_XW, axis=1)
    row_XW = jnp.where(cell_XW < E * G, row_XW, -1)
    group_XW = jnp.arange(X)[:, None] * G + cell_XW % G
    return Came(expert_XW.reshape(-1), row_XW.reshape(-1), group_XW.reshape(-1), size_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounds(one: Callable[..., Array], x_PM: Array, experts: Any, trip: Trip) -> Array:
    """The sum of the rounds; each row is in one of them."""

    def turn(number: Array, y_PM: Array) -> Array:
        return y_PM + one(number, x_PM, experts, trip)

    with jax.named_scope(ROUNDS):
        return lax.fori_loop(0, trip.rounds, turn, zeros_as(x_PM.shape, x_PM))


def _forward(one: Callable[..., Array], x_PM: Array, experts: Any, trip: Trip):
    return _rounds(one, x_PM, experts, trip), (x_PM, experts, trip)


def _backward(one: Callable[..., Array], saved: Any, d_PM: Array):
    """Rows travel again, and what a round keeps is computed again: how many rounds' worth there
    would be to keep, no program knows."""
    x_PM, experts, trip = saved

    def turn(number: Array, sums: Any) -> Any:
        _, gradients = jax.vjp(lambda x, w: one(number, x, w, trip), x_PM, experts)
        return jax.tree.map(jnp.add, sums, gradients(d_PM))

    zeros = jax.tree.map(lambda like: zeros_as(like.shape, like), (x_PM, experts))
    with jax.named_scope(ROUNDS):
        return *lax.fori_loop(0, trip.rounds, turn, zeros), None


_rounds.defvjp(_forward, _backward)

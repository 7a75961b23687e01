"""Packing: which pairs share a row, and which rows a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
# How far ahead of an even share the steps of a plan go, tried in this order.
_HURRIES = (1.0, 1.005, 1.01, 1.02, 1.05)
TRIES = len(_HURRIES)


class Shape(NamedTuple):
    """Of a packed batch."""

    rows: int
    source_length: int
    target_length: int


class Plan(NamedTuple):
    """Consecutive steps over K pairs: step s has the pairs cursors[s] ... cursors[s + 1] - 1, in
    the rows rows[s]; a pair of the last step that fits nowhere has row -1."""

    cursors: list[int]
    rows: list[Ints]

    @property
    def left(self) -> int:
        """Number of pairs that fit nowhere."""
        return int((self.rows[-1] < 0).sum())


def plan(
    source_lengths: Ints,
    target_lengths: Ints,
    steps: int,
    shape: Shape,
    tries: int = TRIES,
) -> Plan:
    """Pairs [K], K >= steps * rows, in their order -> steps of about the same load.

    Each step takes its part of the load that is left, less where that does not pack. If in the
    end pairs are left over, all steps are planned again to take a little more than their part,
    which leaves the last ones more room; `tries` plans at most.
    """
    assert len(source_lengths) >= steps * shape.rows
    best = _plan(source_lengths, target_lengths, steps, shape, _HURRIES[0])
    for hurry in _HURRIES[1:tries]:
        if not best.left:
            break
        other = _plan(source_lengths, target_lengths, steps, shape, hurry)
        best = min(best, other, key=lambda made: made.left)
    return best


def _plan(
    source_lengths: Ints, target_lengths: Ints, steps: int, shape: Shape, hurry: float
) -> Plan:
    share = source_lengths / shape.source_length + target_lengths / shape.target_length
    load = np.concatenate([np.zeros(1), np.cumsum(share)])
    cursors, rows = [0], list[Ints]()

    def pack(start: int, stop: int) -> Ints:
        return first_fit_decreasing(source_lengths[start:stop], target_lengths[start:stop], shape)

    for later in range(steps - 1, 0, -1):
        start, end = cursors[-1], len(share)
        wanted = load[start] + hurry * (load[-1] - load[start]) / (later + 1)
        # As many pairs as there are rows always fit; so many are left for every later step.
        least, most = start + shape.rows, end - shape.rows * later
        stop = min(max(int(np.searchsorted(load, wanted, side="right")) - 1, least), most)
        # The last pairs wait for the next step, so that no pair overtakes another.
        while (left := int(((packed := pack(start, stop)) < 0).sum())) > 0:
            stop -= left
        cursors.append(stop)
        rows.append(packed)
    rows.append(pack(cursors[-1], len(share)))
    return Plan([*cursors, len(share)], rows)


def first_fit_decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Pairs [K] -> the row of each, -1 for what fits nowhere.

    Longest first, each into the first row that has room for both sides. Source: Johnson 1973,
    in two dimensions as vector bin packing, the size of a pair being its larger share of a row.
    """
    share: Any = np.maximum(
        source_lengths / shape.source_length, target_lengths / shape.target_length
    )
    source_room = np.full(shape.rows, shape.source_length)
    target_room = np.full(shape.rows, shape.target_length)
    result = np.full(len(share), -1)
    for i in np.argsort(-share, kind="stable"):
        fits = (source_room >= source_lengths[i]) & (target_room >= target_lengths[i])
        row = fits.argmax()
        if fits[row]:
            result[i] = row
            source_room[row] -= source_lengths[i]
            target_room[row] -= target_lengths[i]
    return result

"""Packing: which pairs share a row, and which rows a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.stream import kernels

Ints = npt.NDArray[np.int64]
# How far ahead of an even share the steps of a plan go, in thousandths, tried in this order.
_HURRIES = (1000, 1005, 1010, 1020, 1050)
TRIES = len(_HURRIES)
# First fit looks at every row: beyond so many, parts of a step are packed apart.
_MOST_ROWS = 512


class Shape(NamedTuple):
    """Of a batch."""

    rows: int
    source_length: int
    target_length: int


class BatchPlan(NamedTuple):
    """Consecutive steps over K pairs: the step and the row of each pair, and each step's shape.

    A pair that fits in no row has row -1.
    """

    step_of: Ints
    row_of: Ints
    shapes: list[Shape]

    @property
    def left(self) -> int:
        """Number of pairs that fit in no row."""
        return int((self.row_of < 0).sum())


def plan(
    source_lengths: Ints,
    target_lengths: Ints,
    directions: Ints,
    epochs: Ints,
    steps: int,
    shape: Shape,
    tries: int = TRIES,
) -> BatchPlan:
    """Pairs [K], K >= steps * rows, in the order of their draws -> steps of about the same load.

    Each step takes the next pairs, its part of the load that is left, less where that does not
    pack (first_fit_decreasing). The gaps then go to pairs further on, the largest first, up to
    that part of the load; but only to pairs of the epoch that their direction is in, so that after
    every step no pair has been seen twice before another one of its direction was seen once. If in
    the end pairs are left over, all steps are planned again to take a little more than their part,
    which leaves the last ones more room; `tries` plans at most.
    """
    assert len(source_lengths) >= steps * shape.rows
    parts = _parts(shape.rows)
    rows, number = shape.rows // parts, int(directions.max()) + 1
    made = []
    for hurry in _HURRIES[:tries]:
        part_of, row_of = np.empty_like(source_lengths), np.empty_like(source_lengths)
        left = kernels.plan(
            source_lengths,
            target_lengths,
            directions,
            epochs,
            np.empty(number, np.int64),
            steps * parts,
            shape.source_length,
            shape.target_length,
            np.empty(rows, np.int64),
            np.empty(rows, np.int64),
            hurry,
            part_of,
            row_of,
        )
        made.append((left, part_of, row_of))
        if not left:
            break
    _, part_of, row_of = min(made, key=lambda one: one[0])
    row_of = np.where(row_of < 0, -1, row_of + part_of % parts * rows)
    return BatchPlan(part_of // parts, row_of, [shape] * steps)


def first_fit_decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Pairs [K] -> the row of each, -1 for what fits in none.

    Longest first, each into the first row that has room for both sides. Source: Johnson 1973,
    in two dimensions as vector bin packing, the size of a pair being its larger share of a row.
    """
    share = kernels.shares(source_lengths, target_lengths, shape.source_length, shape.target_length)
    row_of = np.empty(len(share), np.int64)
    kernels.first_fit(
        kernels.decreasing(np.arange(len(share)), share),
        len(share),
        source_lengths,
        target_lengths,
        np.full(shape.rows, shape.source_length),
        np.full(shape.rows, shape.target_length),
        row_of,
    )
    return row_of


def _parts(rows: int) -> int:
    """Into how many equal parts a step's rows are cut: the fewest with at most _MOST_ROWS rows,
    1 where only many small parts would be equal."""
    fewest = -(-rows // _MOST_ROWS)
    return next((parts for parts in range(fewest, 2 * fewest + 1) if rows % parts == 0), 1)

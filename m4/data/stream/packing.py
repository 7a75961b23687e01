"""Packing: chooses the pairs of a row, and the rows of a step."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.stream import numba_loops

Ints = npt.NDArray[np.int64]
# Shares of the load that a plan's steps take, in thousandths of an even one, in order of trial.
_HURRIES = (1000, 1005, 1010, 1020, 1050)
TRIES = len(_HURRIES)
# First fit looks at every row: with more of them, parts of a step are packed apart.
_MOST_ROWS = 512


class Shape(NamedTuple):
    """Shape of one batch."""

    rows: int
    source_length: int
    target_length: int


class BatchPlan(NamedTuple):
    """Step and row of each of K pairs; a pair that fits in no row has row -1."""

    step_of: Ints
    row_of: Ints

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
    """Plans steps of about the same load for pairs in the order of their draws.

    Each step takes the next pairs, its part of the remaining load, or fewer where these do not pack
    (`first_fit_decreasing`). The gaps then go to later pairs, the largest first, up to that part of
    the load, but only to pairs of their direction's present epoch: after every step no pair has
    been seen twice before another one of its direction was seen once. If pairs are left over in the
    end, all steps are planned again to take a little more than their part, which leaves the last
    ones more room.

    Args:
        source_lengths: [K] lengths of the sources; K >= steps * rows.
        target_lengths: [K] lengths of the targets.
        directions: [K] numbers of the directions.
        epochs: [K] epochs of the pairs.
    """
    assert len(source_lengths) >= steps * shape.rows
    parts = _parts(shape.rows)
    rows, number = shape.rows // parts, int(directions.max()) + 1
    made = []
    for hurry in _HURRIES[:tries]:
        part_of, row_of = np.empty_like(source_lengths), np.empty_like(source_lengths)
        left = numba_loops.plan(
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
    return BatchPlan(part_of // parts, row_of)


def first_fit_decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Returns [K] rows of pairs, -1 for pairs that fit in none.

    Pairs go, the longest first, into the first row that has room for both sides. Source: Johnson
    1973, in two dimensions as vector bin packing; the size of a pair is its larger share of a row.
    """
    lengths = source_lengths, target_lengths
    share = numba_loops.shares(*lengths, shape.source_length, shape.target_length)
    row_of = np.empty(len(share), np.int64)
    numba_loops.first_fit(
        numba_loops.decreasing(np.arange(len(share)), share),
        len(share),
        *lengths,
        np.full(shape.rows, shape.source_length),
        np.full(shape.rows, shape.target_length),
        row_of,
    )
    return row_of


def _parts(rows: int) -> int:
    """Returns the fewest equal parts of at most _MOST_ROWS rows; 1 where only many are equal."""
    fewest = -(-rows // _MOST_ROWS)
    return next((parts for parts in range(fewest, 2 * fewest + 1) if rows % parts == 0), 1)

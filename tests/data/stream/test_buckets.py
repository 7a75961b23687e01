from __future__ import annotations

import numpy as np
import pytest

from m4.data.stream.buckets import bucket_of, plan, shapes
from m4.data.stream.packing import Shape

BUCKETS = [Shape(8, 10, 10), Shape(4, 20, 20), Shape(2, 40, 40)]


def test_shapes() -> None:
    # 16 rows of 128 + 128 have 4,096 tokens: 4096 / 2w rows, rounded down to eights. For 48:
    # 42 -> 40; for 96: 21 -> 16.
    assert shapes(16, 128, 128) == [
        (128, 16, 16),
        (64, 32, 32),
        (40, 48, 48),
        (32, 64, 64),
        (16, 96, 96),
        (16, 128, 128),
    ]
    # Sides of other lengths: a width beyond a side is that side. 4 * 300 / (40 + 40) = 15,
    # 1200 / (100 + 150) = 4.8, 1200 / 300 = 4.
    assert shapes(4, 100, 200, (40, 150), 1) == [(15, 40, 40), (4, 100, 150), (4, 100, 200)]
    assert shapes(3, 20, 20, (), 1) == [(3, 20, 20)]


def test_bucket_of_is_the_narrowest_that_holds_both_sides() -> None:
    source, target = np.array([1, 10, 10, 11, 21, 40]), np.array([10, 10, 11, 3, 20, 40])
    assert bucket_of(source, target, BUCKETS).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_plan_by_hand() -> None:
    # 11 narrow pairs (8 rows a batch), one of the middle (4), one wide (2). Four steps: narrow
    # ones in two batches, which share the empty rows (5 and 6 pairs); a batch for each other one.
    bucket = np.array([0] * 11 + [1] + [2])
    narrow, middle, wide = BUCKETS
    made = plan(bucket, 4, BUCKETS, key=0)
    assert sorted(made.shapes) == sorted([narrow, narrow, middle, wide])
    assert made.row_of.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 0]
    assert len(set(made.step_of[:5])) == len(set(made.step_of[5:11])) == 1
    assert made.shapes[made.step_of[11]] == middle
    # Three steps: the middle pair goes up.
    made = plan(bucket, 3, BUCKETS, key=0)
    assert sorted(made.shapes) == sorted([narrow, narrow, wide])
    assert made.step_of[11] == made.step_of[12] == made.shapes.index(wide)
    assert made.row_of[11:].tolist() == [0, 1]
    # Two: 3 narrow ones go up to the middle one, and the wide pair has no place; it is counted.
    made = plan(bucket, 2, BUCKETS, key=0)
    assert sorted(made.shapes) == sorted([narrow, middle])
    assert made.row_of.tolist() == [*range(8), 0, 1, 2, 3, -1]
    assert made.left == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_pair_has_a_place(seed: int) -> None:
    """Any mix of lengths, any number of steps that suffices: nothing is left, no batch is empty."""
    rng = np.random.default_rng(seed)
    bucket = rng.choice(3, rng.integers(60, 400), p=rng.dirichlet([1, 1, 1]))
    needed = int(np.ceil(np.bincount(bucket, minlength=3) / [8, 4, 2]).sum())
    for steps in (needed, needed + 1, needed + 9, min(len(bucket), 3 * needed)):
        made = plan(bucket, steps, BUCKETS, key=seed)
        assert made.left == 0
        assert len(made.shapes) == steps
        assert np.array_equal(np.unique(made.step_of), np.arange(steps))
        for step, shape in enumerate(made.shapes):
            inside = made.step_of == step
            assert len(set(made.row_of[inside].tolist())) == inside.sum() <= shape.rows
            assert made.row_of[inside].max() < shape.rows
            assert bucket[inside].max() <= BUCKETS.index(shape), "a pair is in its width or wider"


def test_the_order_of_batches_depends_on_the_key() -> None:
    bucket = np.repeat([0, 1, 2], [80, 40, 20])
    orders = {tuple(plan(bucket, 30, BUCKETS, key).shapes) for key in range(5)}
    assert len(orders) == 5
    assert plan(bucket, 30, BUCKETS, 3).shapes == plan(bucket, 30, BUCKETS, 3).shapes


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"Stream\.widths = \[0, 9\]: must be rising"):
        shapes(8, 128, 128, (0, 9))
    with pytest.raises(ValueError, match=r"Stream\.batch_rows = 8: must be a multiple of"):
        shapes(8, 128, 128, rows_multiple=3)

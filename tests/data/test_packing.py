from __future__ import annotations

import numpy as np
import pytest

from m4.data.packing import Shape, first_fit_decreasing, plan

SHAPE = Shape(rows=8, source_length=64, target_length=64)


def lengths(pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """About 13 ids, long ones up to 64, both sides alike."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.gamma(5.0, 2.6, pairs), 2, 62).astype(int) + 2
    return source, np.clip(source + rng.integers(-3, 3, pairs), 2, 64)


def test_first_fit_decreasing_by_hand() -> None:
    # Rows of 10/10. By larger side: pair 1 (7/2), 3 (2/6), 0 (5/5), 2 (3/1), 4 (2/2).
    # 1 -> row 0 (left 3/8); 3 -> row 0 (left 1/2); 0 -> row 1 (left 5/5); 2 -> row 1 (left 2/4);
    # 4 -> row 1.
    source, target = np.array([5, 7, 3, 2, 2]), np.array([5, 2, 1, 6, 2])
    assert first_fit_decreasing(source, target, Shape(2, 10, 10)).tolist() == [1, 0, 1, 0, 1]
    # One row: 1 and 3 fit; of the rest nothing does.
    assert first_fit_decreasing(source, target, Shape(1, 10, 10)).tolist() == [-1, 0, -1, 0, -1]


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_all_pairs_in_order_and_fits(seed: int) -> None:
    steps = 32
    source, target = lengths(1000, seed)
    made = plan(source, target, steps, SHAPE)
    assert made.left == 0
    assert made.cursors[0] == 0
    assert made.cursors[-1] == 1000
    assert len(made.rows) == steps
    for start, stop, rows in zip(made.cursors, made.cursors[1:], made.rows, strict=False):
        assert stop - start == len(rows) >= SHAPE.rows
        assert rows.min() >= 0
        assert np.bincount(rows, source[start:stop]).max() <= SHAPE.source_length
        assert np.bincount(rows, target[start:stop]).max() <= SHAPE.target_length


def test_steps_have_about_the_same_load() -> None:
    source, target = lengths(900)
    made = plan(source, target, 32, SHAPE)
    loads = np.add.reduceat(source + target, made.cursors[:-1])
    assert loads.std() < 0.05 * loads.mean()


def test_what_cannot_fit_is_left_over_in_the_last_step() -> None:
    # 40 pairs of 33 ids: one a row, 8 rows, 4 steps hold 32.
    source = np.full(40, 33)
    made = plan(source, source, 4, SHAPE)
    assert made.cursors == [0, 8, 16, 24, 40]
    assert made.left == 8
    assert [int((rows >= 0).sum()) for rows in made.rows] == [8, 8, 8, 8]


def test_more_tries_leave_no_less_room() -> None:
    for seed in range(10):
        source, target = lengths(1130, seed)
        assert plan(source, target, 32, SHAPE).left <= plan(source, target, 32, SHAPE, 1).left

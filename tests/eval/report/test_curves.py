"""Curves over training steps, and the heat map of gradients' cosines."""

import numpy as np

from m4.eval.report import curves
from m4.eval.report.cosines import last

ROWS = [
    {"step": 10, "gradients/cosine/high/low": 0.9, "gradients/cosine/high/en->xx": None},
    {"step": 20, "gradients/cosine/high/low": -0.25, "gradients/cosine/low/中文": 0.5,
     "gradients/cosine/high/中文": 0.125, "gradients/alignment/en-gl": 0.5},
    {"step": 25, "nll": 1.0},
]  # fmt: skip


def test_points_are_by_step_and_the_later_row_counts():
    rows = [
        {"step": 20, "nll": 3.0},
        {"step": 10, "nll": 4.0},
        {"step": 10, "dev": 1.0},
        {"step": 20, "nll": 2.5},  # resumed from a checkpoint before step 20
        {"step": 30, "nll": float("nan")},
        {"step": 40, "nll": None},
    ]
    assert curves.points(rows, "nll") == [(10, 4.0), (20, 2.5)]


def test_the_last_measurement_is_drawn():
    found = last(ROWS)
    assert found is not None
    assert (found.step, found.names) == (20, ["high", "low", "中文"])
    wanted = [[1, -0.25, 0.125], [-0.25, 1, 0.5], [0.125, 0.5, 1]]
    np.testing.assert_array_equal(found.matrix, wanted)
    assert last(ROWS[2:]) is None

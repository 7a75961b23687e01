"""Curves over training steps."""

from m4.eval.report import curves


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

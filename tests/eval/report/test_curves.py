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


def tokens(source: float, target: float) -> dict[str, float]:
    return {"source_tokens": source, "target_tokens": target}


def test_points_over_tokens_and_hours():
    """A dev loss stands at the last counted step; one before any count is left out."""
    rows = [
        {"step": 1, "dev": 9.0},
        {"step": 2, "nll": 4.0, **tokens(30.0, 20.0), "device_seconds": 360},
        {"step": 4, "nll": 3.0, **tokens(10.0, 10.0), "device_seconds": 720},
        # Resumed from step 2: the later row counts.
        {"step": 4, "nll": 2.0, **tokens(5.0, 5.0), "device_seconds": 1080},
        {"step": 5, "dev": 1.0},
    ]  # fmt: skip
    nll, dev = curves.points(rows, "nll"), curves.points(rows, "dev")
    assert curves.over(nll, rows, "steps") == nll
    assert curves.over(nll, rows, "tokens") == [(50.0, 4.0), (60.0, 2.0)]
    assert curves.over(nll, rows, "hours") == [(0.1, 4.0), (0.3, 2.0)]
    assert curves.over(dev, rows, "tokens") == [(60.0, 1.0)]
    assert curves.over(nll, [{"step": 2, "nll": 4.0}], "hours") == []

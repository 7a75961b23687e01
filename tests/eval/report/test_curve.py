import re

import pytest

from m4.eval.report import curve


def test_points_are_by_step_and_the_later_row_counts():
    rows = [
        {"step": 20, "nll": 3.0},
        {"step": 10, "nll": 4.0},
        {"step": 10, "dev": 1.0},
        {"step": 20, "nll": 2.5},  # resumed from a checkpoint before step 20
        {"step": 30, "nll": float("nan")},
        {"step": 40, "nll": None},
    ]
    assert curve.points(rows, "nll") == [(10, 4.0), (20, 2.5)]


def test_lines_are_inside_the_drawing():
    text = str(curve.svg({"a": [(0, 7.3), (500, 2.0), (1600, 1.1)]}, "nll"))
    (points,) = re.findall(r'points="([^"]*)"', text)
    places = [tuple(map(float, place.split(","))) for place in points.split()]
    assert len(places) == 3
    # The first step at the left edge, the last at the right one; a smaller value is lower.
    assert (places[0][0], places[2][0]) == (48, 630)
    assert 12 <= places[0][1] < places[1][1] < places[2][1] <= 226


def test_long_series_are_thinned():
    line = [(step, 1.0) for step in range(10_000)]
    (points,) = re.findall(r'points="([^"]*)"', str(curve.svg({"a": line}, "nll")))
    assert len(points.split()) == 240


@pytest.mark.parametrize("value", [0.0, 3.0, -2e-7, 1e9])
def test_a_flat_line_is_drawn(value):
    assert "polyline" in curve.svg({"a": [(1, value), (2, value)]}, "nll")


def test_fewer_than_two_points_draw_nothing():
    assert curve.svg({"a": [(1, 1.0)], "b": []}, "nll") == ""


def test_labels_are_escaped():
    assert "<b>" not in curve.svg({"a": [(0, 1), (1, 2)]}, "<b>", '"><b>')

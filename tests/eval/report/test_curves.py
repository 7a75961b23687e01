"""Curves over training steps, and the heat map of gradients' cosines."""

import warnings

import numpy as np

from m4.eval.report import curves
from m4.eval.report.cosines import Cosines, figure, last
from m4.eval.report.figures import inline
from m4.eval.report.page import Background
from m4.eval.report.results import _cosines

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


def test_a_panel_a_measure_and_a_line_a_system():
    line = [(step, 1.0) for step in range(10_000)]
    drawn = curves.training({"nll": {"a": line}, "other": {"a": line, "b": [(1, 0.0), (2, 0.0)]}})
    first, second = drawn.axes
    assert [len(np.asarray(one.get_xdata())) for one in first.lines] == [240]
    assert [one.get_label() for one in second.lines] == ["a", "b"]
    assert first.lines[0].get_color() == second.lines[0].get_color()
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["a", "b"]


def test_the_last_measurement_is_drawn():
    found = last(ROWS)
    assert found is not None
    assert (found.step, found.names) == (20, ["high", "low", "中文"])
    wanted = [[1, -0.25, 0.125], [-0.25, 1, 0.5], [0.125, 0.5, 1]]
    np.testing.assert_array_equal(found.matrix, wanted)
    assert last(ROWS[2:]) is None


def test_names_in_any_script_are_text_of_the_page():
    names = ["high", "中文", "العربية", "<b>", "a very long name of a group"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of glyphs that it lacks
        text = inline(figure(Cosines(1, names, np.eye(5))), "cosines")
    for shown in ("中文", "العربية", "&lt;b&gt;", "a very long n…"):
        assert text.count(f">{shown}</text>") == 2
    found = _cosines(Background(curves={"multilingual": ROWS, "dense": []}))
    assert [(one["system"], one["step"]) for one in found] == [("multilingual", 20)]

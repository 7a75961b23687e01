"""The heat map of gradients' cosines: its numbers, and labels that no font can draw."""

import warnings

import numpy as np

from m4.eval.report.cosines import Cosines, figure, labels, last
from m4.eval.report.figures import png
from m4.eval.report.page import Background
from m4.eval.report.results import _cosines

ROWS = [
    {"step": 10, "gradients/cosine/high/low": 0.9, "gradients/cosine/high/en->xx": None},
    {"step": 20, "gradients/cosine/high/low": -0.25, "gradients/cosine/low/中文": 0.5,
     "gradients/cosine/high/中文": 0.125, "gradients/alignment/en-gl": 0.5},
    {"step": 25, "nll": 1.0},
]  # fmt: skip


def test_the_last_measurement_is_drawn():
    found = last(ROWS)
    assert found is not None
    assert (found.step, found.names) == (20, ["high", "low", "中文"])
    wanted = [[1, -0.25, 0.125], [-0.25, 1, 0.5], [0.125, 0.5, 1]]
    np.testing.assert_array_equal(found.matrix, wanted)
    assert last(ROWS[2:]) is None


def test_what_no_font_draws_is_numbered_and_listed():
    names = ["high", "中文", "العربية", "עברית", "ελληνικά", "a very long name of a group"]
    assert labels(names) == ["high", "#2", "#3", "#4", "ελληνικά", "a very long n…"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of glyphs that it lacks
        assert png(figure(Cosines(1, names, np.eye(6))))[:4] == b"\x89PNG"
    shown = _cosines(Background(curves={"multilingual": ROWS, "dense": []}))
    assert [(one["system"], one["step"], one["names"]) for one in shown] == [
        ("multilingual", 20, [("#3", "中文")])
    ]


def test_forty_groups_have_a_label_each_second():
    names = [f"g{i}" for i in range(40)]
    panel = figure(Cosines(1, names, np.full((40, 40), 0.5))).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == names[::2]

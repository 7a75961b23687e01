"""Heat maps of values from each language into each other."""

from __future__ import annotations

import numpy as np

from m4.eval.report.heat_map import figure


def texts(values: dict[str, float], **options: object) -> list[str]:
    panel = figure(values, {}, **options).axes[0]  # type: ignore[arg-type]
    return [text.get_text() for text in panel.texts]


def test_rows_are_sources_and_columns_targets_english_first() -> None:
    panel = figure({"wo-fr": 1.0, "fr-en": 2.0, "en-wo": -4.0}, {"fr": "français"}).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["en", "français", "wo"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["en", "français", "wo"]
    grid = np.asarray(panel.images[0].get_array(), float)
    nothing = np.nan
    expected = [[nothing, nothing, -4], [2, nothing, nothing], [nothing, 1, nothing]]
    np.testing.assert_array_equal(np.ma.filled(grid, nothing), expected)


def test_numbers_are_signed_rounded_and_left_out_of_large_maps() -> None:
    assert texts({"a-b": 1.25, "b-a": -0.5}, signed=True) == ["+1.2", "−0.5"]
    assert texts({"a-b": 41.7}, percent=True) == ["42"]
    many = {f"l{n}-l{n + 1}": float(n) for n in range(17)}
    assert texts(many) == []


def test_trained_directions_have_a_frame() -> None:
    panel = figure({"fr-wo": 1.0, "wo-fr": 2.0}, {}, framed=["wo-fr"]).axes[0]
    (frame,) = panel.patches
    assert (frame.get_x(), frame.get_y()) == (-0.46, 1 - 0.46)  # type: ignore[attr-defined]

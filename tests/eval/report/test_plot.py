"""Plots over languages (trends, points, maps of all directions), and curves over training."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex

from m4.data.languages import LANGUAGES
from m4.eval.report import curves, plot
from m4.eval.report.figures import LIGHT, inline
from m4.eval.scoring.delta import Delta
from m4.eval.scoring.levels import ResourceLevels


def rows(languages, systems=("moe", "dense"), sides=("xx->en", "en->xx")):
    made = []
    for i, code in enumerate(list(LANGUAGES)[:languages]):
        for number, system in enumerate(systems):
            for side in sides:
                value = i - 3.0 - number
                made.append(
                    Delta(
                        direction=f"{code}-en" if side == "xx->en" else f"en-{code}",
                        language=code, name=LANGUAGES[code].name, side=side, system=system,
                        baseline="bilingual", metric="bleu", train_pairs=6000 // (i + 1),
                        sentences=200, baseline_score=30.0, system_score=30.0 + value,
                        copy_score=4.0, delta=value, low=value - 2, high=value + 3, p_value=0.01,
                        closely_related=("nb",) if code == "fr" else (),
                    )
                )  # fmt: skip
    return made


def test_window_of_the_paper_shrinks_for_few_languages():
    sizes = [plot.window_size(n) for n in (1, 7, 8, 12, 24, 40, 100)]
    assert sizes == [1, 1, 2, 3, 6, 10, 10]


def test_trend_by_hand():
    # Means of 1 2 6, 2 6 7, at the windows' middles; what is missing counts for nothing.
    positions, means = plot.trend([1, 2, 6, 7], 3)
    np.testing.assert_allclose(positions, [1, 2])
    np.testing.assert_allclose(means, [3, 5])
    positions, means = plot.trend([1, np.nan, np.nan, 4], 2)
    np.testing.assert_allclose(positions, [0.5, 2.5])
    np.testing.assert_allclose(means, [1, 4])
    for window in (1, 5):
        assert not plot.trend([1, 2, 6, 7], window)[0].size


@pytest.mark.parametrize("languages", [1, 2, 12, 50])
@pytest.mark.parametrize("sides", [("xx->en",), ("xx->en", "en->xx")])
def test_any_number_of_languages(languages, sides):
    figure = plot.figure(rows(languages, sides=sides))
    *panels, sizes = figure.axes
    assert [panel.get_ylabel() for panel in panels] == [
        f"ΔBLEU, {side.replace('->', ' → ')}" for side in sides
    ]
    # Falling training size is the table's order here.
    assert [t.get_text() for t in sizes.get_xticklabels()] == list(LANGUAGES)[:languages]
    low, high = panels[0].get_ylim()
    assert low < 0 < high
    assert low < -3 - 1 - 2
    assert high > languages - 1 - 3 + 3


def faces(figure):
    return [to_hex(face) for face in figure.axes[0].collections[1].get_facecolor()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_small_test_sets_are_hollow_and_decide_neither_axis_nor_trend():
    plain = rows(12, systems=("moe",))
    odd = {"delta": 90.0, "low": 20.0, "high": 99.0, "sentences": 49}
    mixed = [replace(row, **odd) if row.language == "it" else row for row in plain]
    figure, rest = plot.figure(mixed), plot.figure([r for r in plain if r.language != "it"])
    place = [row.language for row in plain if row.side == "xx->en"].index("it")
    assert [face == LIGHT.paper for face in faces(figure)] == [i == place for i in range(12)]
    assert legend(figure)[-2:] == ["under 50 test sentences", "bilingual = 0"]
    panel = figure.axes[0]
    assert panel.get_ylim() == rest.axes[0].get_ylim()
    points = np.asarray(panel.collections[1].get_offsets())
    assert points[place][1] == panel.get_ylim()[1]
    # 11 languages that count: a window of 2, and none has the small one.
    lines = [(np.asarray(one.get_xdata()), np.asarray(one.get_ydata())) for one in panel.lines]
    middles, means = next(line for line in lines if len(line[0]) == 10)
    values = [r.delta for r in plain if r.side == "xx->en" and r.language != "it"]
    wanted = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    np.testing.assert_allclose(middles[place - 1], place)
    np.testing.assert_allclose(means, wanted)
    below = ResourceLevels(min_test_sentences=49)
    assert LIGHT.paper not in faces(plot.figure(mixed, levels=below))


def test_a_figure_in_a_page_is_escaped_and_has_no_names_of_its_own():
    made = [replace(row, system="<b>$x$ & 中文 עברית") for row in rows(3, systems=("moe",))]
    text = inline(plot.figure(made, page="narrow"), '"><b>')
    assert text.startswith('<svg class="figure" role="img" aria-label="&#34;&gt;&lt;b&gt;" viewBox')
    assert "<b>" not in text
    assert "&lt;b&gt;$x$ &amp; 中文 עברית</text>" in text
    assert "figure_1" not in text
    assert text == inline(plot.figure(made, page="narrow"), '"><b>')


def texts(values: dict[str, float], **options: object) -> list[str]:
    panel = plot.heat_map(values, {}, **options).axes[0]  # type: ignore[arg-type]
    return [text.get_text() for text in panel.texts]


def test_rows_are_sources_and_columns_targets_english_first() -> None:
    panel = plot.heat_map({"wo-fr": 1.0, "fr-en": 2.0, "en-wo": -4.0}, {"fr": "français"}).axes[0]
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
    panel = plot.heat_map({"fr-wo": 1.0, "wo-fr": 2.0}, {}, framed=["wo-fr"]).axes[0]
    (frame,) = panel.patches
    assert (frame.get_x(), frame.get_y()) == (-0.46, 1 - 0.46)  # type: ignore[attr-defined]


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

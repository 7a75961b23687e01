import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex

from m4.data.languages import LANGUAGES
from m4.eval.report import plot
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


def test_same_rows_same_bytes(tmp_path):
    files = {}
    for run in ("a", "b"):
        paths = [tmp_path / run / f"delta_bleu.{kind}" for kind in ("png", "pdf", "svg")]
        plot.plot(rows(5), paths)
        files[run] = [path.read_bytes() for path in paths]
    assert files["a"] == files["b"]
    assert files["a"][0].startswith(b"\x89PNG")
    assert files["a"][1].startswith(b"%PDF")
    assert b"CreationDate" not in files["a"][1]


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


def test_languages_may_lack_a_direction_and_intervals_may_miss_their_point(tmp_path):
    made = [row for row in rows(12) if (row.language, row.side) != ("de", "xx->en")]
    made[0] = replace(made[0], low=made[0].delta + 1, high=made[0].delta + 2)
    plot.plot(made, [tmp_path / "x.png"])
    assert (tmp_path / "x.png").stat().st_size > 10_000


def faces(figure):
    return [to_hex(face) for face in figure.axes[0].collections[1].get_facecolor()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_pale_points_are_closely_related_languages():
    figure = plot.figure(rows(3, systems=("moe",)))
    full, pale, other = faces(figure)
    assert full == other == LIGHT.series[0].lower()
    assert pale not in (full, LIGHT.paper)
    assert legend(figure) == ["moe", "closely related", "bilingual = 0"]


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


def test_undertrained_points_are_hollow():
    made = [replace(row, copy_score=99.0) if row.language == "fr" else row
            for row in rows(3, systems=("moe",))]  # fmt: skip
    figure = plot.figure(made)
    assert [face == LIGHT.paper for face in faces(figure)] == [False, True, False]
    assert legend(figure)[-2:] == ["undertrained", "bilingual = 0"]


def test_bars_of_many_languages_have_the_colours_of_families():
    assert len(plot.figure(rows(40)).legends) == 1
    figure = plot.figure(rows(50))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "Slavic"
    assert names[-1] == "other"
    colours = [to_hex(bar.get_facecolor()) for bar in figure.axes[-1].patches]
    at = dict(zip(list(LANGUAGES)[:50], colours, strict=True))
    assert at["ru"] == at["cs"] == LIGHT.families[0].lower()
    assert at["eu"] == at["ka"] == LIGHT.families[-1].lower()
    assert at["es"] == at["ca"] != at["de"]


def test_where_all_test_sets_are_small_the_axis_is_theirs():
    figure = plot.figure([replace(row, sentences=7) for row in rows(3)])
    assert set(faces(figure)) == {LIGHT.paper}
    assert figure.axes[0].get_ylim()[1] > 2


def test_a_figure_in_a_page_is_escaped_and_has_no_names_of_its_own():
    made = [replace(row, system="<b>$x$ & 中文 עברית") for row in rows(3, systems=("moe",))]
    text = inline(plot.figure(made, page="narrow"), '"><b>')
    assert text.startswith('<svg class="figure" role="img" aria-label="&#34;&gt;&lt;b&gt;" viewBox')
    assert "<b>" not in text
    assert "&lt;b&gt;$x$ &amp; 中文 עברית</text>" in text
    assert "figure_1" not in text
    assert text == inline(plot.figure(made, page="narrow"), '"><b>')


def test_users_mistakes(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.figure([])
    with pytest.raises(ValueError, match=r"x.jpg: a plot is .png, .pdf or .svg"):
        plot.plot(rows(2), [tmp_path / "x.jpg"])


def test_pyplot_is_not_used():
    code = "import sys, m4.eval.report.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from m4.eval.decoding.settings import DEFAULTS
from m4.eval.metrics import bootstrap
from m4.eval.metrics.bleu import bleu
from m4.eval.metrics.ter import ter
from m4.eval.scoring import delta, score
from m4.eval.scoring.levels import DEFAULT_LEVELS, ResourceLevels
from tests.eval.scoring.test_score import write

TRAIN = {"de": 6000, "hr": 3000, "nl": 1500, "gl": 250, "bs": 200}
LEVELS = ResourceLevels(min_test_sentences=30)
REFERENCES = [f"{n} Swiss francs per hour on May {n} in {2000 + n}" for n in range(1, 31)]


def decode(folder, direction, wrong):
    """Returns hypotheses of which every `wrong`-th lacks its first half (none for 0)."""
    cut = [wrong and i % wrong == 0 for i in range(len(REFERENCES))]
    hypotheses = [r[len(r) // 2 :] if one else r for r, one in zip(REFERENCES, cut, strict=True)]
    write(folder, direction, hypotheses, REFERENCES, [f"x {r[::-1]}" for r in REFERENCES])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decodes")
    for language in TRAIN:
        low = TRAIN[language] < 1000
        for direction in (f"{language}-en", f"en-{language}"):
            decode(folder / "moe", direction, 5)
            decode(folder / "same", direction, 2 if low else 8)
            decode(folder / "bilingual", direction, 2 if low else 8)
    names = ("moe", "same", "bilingual")
    return score.measure([score.System(name, folder / name) for name in names], DEFAULTS.metrics)


def test_rows(measured):
    rows = delta.deltas(measured, TRAIN, "bleu")
    assert [(r.system, r.language, r.side) for r in rows] == [
        (system, language, side)
        for system in ("moe", "same")
        for language in ("de", "hr", "nl", "gl", "bs")
        for side in ("xx->en", "en->xx")
    ]
    for row in rows:
        assert row.delta == pytest.approx(row.system_score - row.baseline_score)
        assert row.low <= row.delta <= row.high
        assert row.copy_score is not None
    german, galician = rows[0], rows[6]
    assert (german.name, german.train_pairs, german.sentences) == ("German", 6000, 30)
    assert german.delta < 0 < galician.delta
    assert galician.low > 0
    assert galician.p_value < 0.05


def test_p_values_are_corrected_over_the_directions_of_a_system(measured):
    rows = delta.deltas(measured, TRAIN, "bleu")
    for system in ("moe", "same"):
        mine = [row for row in rows if row.system == system]
        alone = [bootstrap.normal_p_value(row.delta, row.replicates) for row in mine]
        assert [row.p_holm for row in mine] == bootstrap.holm(alone)
        assert not any(row.significant for row in mine)  # alone, four of them are: p = 0.013
    assert replace(rows[0], p_holm=0.049).significant


def test_of_errors_the_lower_score_is_the_better_one(measured):
    """The copy is reversed text, all of it wrong: no system is worse, by TER as by BLEU."""
    ours = score.measure(measured.systems, [ter, bleu], directions=["gl-en", "en-gl"])
    by_ter, by_bleu = (delta.deltas(ours, TRAIN, name) for name in ("ter", "bleu"))
    for errors, row in zip(by_ter, by_bleu, strict=True):
        assert errors.lower_is_better
        assert not errors.undertrained
        assert (errors.delta < 0) == (row.delta > 0)
        assert replace(errors, copy_score=0.0).undertrained  # a copy without errors
    means = delta.averages([replace(row, copy_score=0.0) for row in by_ter], LEVELS)
    assert all(mean.undertrained for mean in means)


def test_closely_related_languages_are_marked_under_the_codes_of_the_run(measured):
    rows = delta.deltas(measured, TRAIN, "bleu")
    assert {row.language: row.closely_related for row in rows} == {
        "de": (), "hr": ("bs",), "nl": (), "gl": (), "bs": ("hr",),
    }  # fmt: skip


def test_rows_survive_their_file(measured):
    rows = delta.deltas(measured, TRAIN, "bleu")
    again = delta.from_plain(json.loads(json.dumps(delta.plain(rows))))
    assert again == rows
    assert not again[0].replicates.size


def test_averages_by_resource(measured):
    rows = [row for row in delta.deltas(measured, TRAIN, "bleu") if row.system == "moe"]
    means = delta.averages(rows, LEVELS)
    assert [(m.side, m.level, m.languages) for m in means] == [
        (side, *of)
        for side in ("xx->en", "en->xx")
        for of in (("high", 2), ("medium", 1), ("low", 2), ("all", 5))
    ]
    low = means[2]
    group = [row for row in rows if row.side == "xx->en" and row.train_pairs < 1000]
    assert low.delta == pytest.approx(np.mean([row.delta for row in group]))
    assert low.low <= low.delta <= low.high
    # One language's average is itself, interval and all.
    medium, dutch = means[1], next(row for row in rows if row.language == "nl")
    assert (medium.delta, medium.low, medium.high) == (dutch.delta, dutch.low, dutch.high)
    # Same test set, same draws, same systems: the languages move together, so that the interval of
    # their mean is as wide as each one's.
    assert (low.low, low.high) == (group[0].low, group[0].high)


def test_small_test_sets_are_in_no_average_and_are_counted(measured):
    rows = delta.deltas(measured, TRAIN, "bleu")
    rows = [replace(row, sentences=29) if row.language in ("gl", "nl") else row for row in rows]
    means = delta.averages(rows, LEVELS)
    found = {mean.level: mean for mean in means if (mean.side, mean.system) == ("xx->en", "moe")}
    assert {level: mean.languages for level, mean in found.items()} == {
        "high": 2, "low": 1, "all": 3,
    }  # fmt: skip
    bosnian = next(row for row in rows if row.direction == "bs-en")
    assert found["low"].delta == bosnian.delta
    small = delta.small_tests(rows, LEVELS)
    assert set(small) == {"gl-en", "en-gl", "nl-en", "en-nl"}
    said = "2 languages with fewer than 30 test sentences in no mean: gl, nl"
    assert delta.small_tests_line(small, LEVELS) == said
    assert delta.averages(rows) == []


def test_a_score_below_the_copys_is_undertrained_whatever_the_difference(measured):
    rows = [row for row in delta.deltas(measured, TRAIN, "bleu") if row.system == "moe"]
    better = [row for row in rows if row.low > 0]
    assert better
    copied = {row.direction: row.system_score + 0.1 for row in better}
    rows = [replace(r, copy_score=copied.get(r.direction, 0.0)) for r in rows]
    assert {r.direction for r in rows if r.undertrained} == {*copied}
    means = delta.averages(rows, LEVELS)
    assert {(m.side, m.level) for m in means if m.undertrained} == {
        ("xx->en", "low"), ("en->xx", "low"),
    }  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO(), markup=False)  # as m4's
    console.print(*delta.tables(rows, means, 200, LEVELS))
    text = console.export_text()
    assert "\\" not in text
    line = next(line for line in text.splitlines() if "gl Galician" in line)
    assert line.count("undertrained") == 2
    one = replace(rows[0], copy_score=None)
    assert not one.undertrained


def test_levels():
    sizes = (3000, 2999, 1000, 999)
    assert [DEFAULT_LEVELS.of(n) for n in sizes] == ["high", "medium", "medium", "low"]

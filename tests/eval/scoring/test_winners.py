"""The best system for each language, and what is forgotten, on made-up translations."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from m4.eval.decoding.settings import DEFAULTS
from m4.eval.metrics import bootstrap
from m4.eval.scoring import winners
from m4.eval.scoring.delta import deltas
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import Measured, System, measure
from m4.eval.scoring.winners import ALL, Cost, Winner
from tests.eval.scoring.test_delta import TRAIN, decode

LEVELS = ResourceLevels(min_test_sentences=30)
# Every n-th sentence is wrong; 0: none. The systems of a language from the best to the worst.
WRONG = {
    "bilingual": {"de": 0, "hr": 2, "nl": 8, "gl": 2},
    "shared": {"de": 2, "hr": 4, "nl": 8, "gl": 2},
    "continued": {"de": 2, "hr": 0, "nl": 8, "gl": 5},
}
COSTS = {"bilingual": Cost(0.5, 10), "shared": Cost(0.25, 20), "continued": Cost(1.0, 30)}


def made(folder: Path, wrong: Mapping[str, Mapping[str, int]] = WRONG) -> Measured:
    for name, languages in wrong.items():
        for code, every in languages.items():
            decode(folder / name, f"{code}-en", every)
            decode(folder / name, f"en-{code}", every and every + 1)
    return measure([System(name, folder / name) for name in wrong], DEFAULTS.metrics)


def by_language(measured: Measured, costs: Mapping[str, Cost] = COSTS) -> dict[str, Winner]:
    found = winners.winners(measured, "bleu", TRAIN, costs, LEVELS)
    return {row.language: row for row in found}


def test_the_lead_has_the_interval_of_a_slow_bootstrap(tmp_path: Path) -> None:
    measured = made(tmp_path)
    found = by_language(measured)
    assert [*found] == ["de", "hr", "nl", "gl", ALL]  # by falling size
    drawn = np.random.default_rng(bootstrap.SEED).choice(30, (bootstrap.RESAMPLES, 30))

    def scores(system: str, languages: list[str]) -> list[float]:
        """Returns each resample's score, the mean of formulas over sums, one at a time."""
        each = [measured.statistics[system, direction, "bleu"]
                for code in languages for direction in (f"{code}-en", f"en-{code}")]  # fmt: skip
        return [
            float(np.mean([one.formula(one.counts[rows].sum(axis=0)[None].astype(float))[0]
                           for one in each]))
            for rows in drawn
        ]  # fmt: skip

    for code, languages in (("gl", ["gl"]), (ALL, ["de", "hr", "nl", "gl"])):
        row = found[code]
        ours = scores(row.best, languages)
        assert row.leads
        for name, (lead, low, high) in row.leads.items():
            differences = np.subtract(ours, scores(name, languages))
            # sacreBLEU's order statistics of 1,000 resamples: the 26th from both ends.
            assert (low, high) == pytest.approx([*np.sort(differences)[[25, -26]]])
            assert lead == pytest.approx(row.scores[row.best] - row.scores[name])


def test_one_direction_has_the_interval_of_its_delta(tmp_path: Path) -> None:
    for name, every in (("a", 0), ("b", 3)):
        decode(tmp_path / name, "gl-en", every)
    measured = measure([System(n, tmp_path / n) for n in ("a", "b")], DEFAULTS.metrics)
    row = winners.winners(measured, "bleu", TRAIN, {"a": Cost(), "b": Cost()}, LEVELS)[0]
    (delta,) = deltas(measured, TRAIN, "bleu", baseline="b")
    assert row.best == "a"
    assert row.leads["b"] == (delta.delta, delta.low, delta.high)


def test_level_systems_go_to_the_cheapest(tmp_path: Path) -> None:
    found = by_language(made(tmp_path))
    assert {code: row.best for code, row in found.items() if code != "nl"} == {
        "de": "bilingual", "hr": "continued", "gl": "continued", ALL: "continued"}  # fmt: skip
    assert (found["de"].level, found["de"].take) == (("bilingual",), "bilingual")
    # All three have translated Dutch alike: no lead, and `shared` took the fewest hours.
    assert set(found["nl"].leads.values()) == {(0, 0, 0)}
    assert ({*found["nl"].level}, found["nl"].take) == ({*COSTS}, "shared")
    # Without its hours nobody knows which of them is the cheapest.
    unknown = by_language(made(tmp_path), {**COSTS, "shared": Cost(None, 1)})
    assert unknown["nl"].take == unknown["nl"].best
    assert unknown["de"].take == "bilingual"


def test_advice_follows_from_the_numbers(tmp_path: Path) -> None:
    measured = made(tmp_path)
    rows = winners.winners(measured, "bleu", TRAIN, COSTS, LEVELS)
    leads = rows[-1].leads
    second = max(leads, key=lambda name: rows[-1].scores[name])
    lead, low, high = leads[second]
    assert winners.advice(rows, COSTS, "bleu") == (
        f"Take continued: {lead:+.1f} BLEU [{low:+.1f}, {high:+.1f}] on average to {second}, the "
        "next; best or level in 3 of 4 languages; bilingual for de."
    )
    # The same three systems on Dutch and Galician alone: level within the interval.
    few = {name: {"nl": 8, "gl": 8 - (name == "continued")} for name in WRONG}
    rows = winners.winners(made(tmp_path / "few", few), "bleu", TRAIN, COSTS, LEVELS)
    said = winners.advice(rows, COSTS, "bleu")
    assert said.startswith("Take shared: level on average with ")
    assert "and the cheapest; best or level in 2 of 2 languages." in said
    large = ResourceLevels(min_test_sentences=31)
    rows = winners.winners(measured, "bleu", TRAIN, COSTS, large)
    assert winners.advice(rows, COSTS, "bleu") == ""


def test_costs_of_rows_and_of_several_runs() -> None:
    rows = [
        {"step": 2, "source_tokens": 3.0, "target_tokens": 4.0, "device_seconds": 1800.0,
         "model_flops": 2e15},
        {"step": 2, "dev/nll": 1.0},
        {"step": 4, "source_tokens": 5.0, "target_tokens": 6.0, "device_seconds": 5400.0,
         "model_flops": 3e15},
    ]  # fmt: skip
    # Seconds and FLOPs are since the beginning, tokens since a row.
    assert winners.cost_of(rows) == Cost(1.5, 18, 3e15)
    assert winners.total([Cost(1.5, 18), Cost(0.5, 2)]) == Cost(2.0, 20)
    assert winners.total([Cost(1.5, 18), Cost(None, 2)]) == Cost(None, 20)
    assert winners.total([]) == winners.cost_of([]) == Cost(None, None)


def test_forgetting_is_the_mean_and_the_worst_change(tmp_path: Path) -> None:
    made(tmp_path, {"old": {"de": 0, "nl": 8, "gl": 0}, "new": {"de": 0, "nl": 4, "gl": 2}})
    old, new = (System(name, tmp_path / name) for name in ("old", "new"))
    kept = ["nl-en", "gl-en", "en-gl"]
    rows = winners.changes(old, new, kept, DEFAULTS.metrics[0], TRAIN)
    assert {row.direction for row in rows} == {*kept}
    found = winners.forgotten(rows, LEVELS)
    assert found is not None
    # By hand: differences of the two scores; the interval of their mean over the same resamples.
    measured = measure([old, new], DEFAULTS.metrics[:1], directions=kept)
    of = {(s, d): measured.statistics[s, d, "bleu"] for s in ("old", "new") for d in kept}
    by_hand = {d: of["new", d].value() - of["old", d].value() for d in kept}
    assert (found.directions, found.mean) == (3, pytest.approx(np.mean([*by_hand.values()])))
    assert (found.worst.direction, found.worst.delta) == min(
        by_hand.items(), key=lambda item: item[1]
    )
    replicates = np.mean([bootstrap.resample(of["new", d]) - bootstrap.resample(of["old", d])
                          for d in kept], axis=0)  # fmt: skip
    assert [found.low, found.high] == pytest.approx([*np.sort(replicates)[[25, -26]]])
    assert winners.forgotten(rows, ResourceLevels(min_test_sentences=31)) is None

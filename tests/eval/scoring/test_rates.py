"""Rates of failed translations: by hand, the identifier's own errors, rows that are kept."""

import random
from collections.abc import Collection
from pathlib import Path

import pytest

from m4.data.cleaning.language_id import Py3langid, installed
from m4.eval.scoring import rates
from m4.eval.scoring.levels import ResourceLevels
from m4.eval.scoring.score import Decode, Measured, System
from m4.storage.files import write_jsonl

LEVELS = ResourceLevels(min_test_sentences=2)


class Words(Py3langid):
    """Identifier of a language by its code in the text, or else of the first allowed one."""

    def __init__(self, *languages: str) -> None:
        self._known, self._among, self.asked = set(languages), sorted(languages), 0

    def languages(self) -> set[str]:
        return self._known

    def choose_among(self, codes: Collection[str]) -> None:
        self._among = sorted(codes)

    def identify(self, text: str) -> tuple[str, float]:
        self.asked += 1
        return next((code for code in self._among if f"[{code}]" in text), self._among[0]), 1.0

    def identity(self) -> dict:
        return {"known": sorted(self._known)}


def measured(by: dict[tuple[str, str], list[Decode]]) -> Measured:
    systems = [System(name, Path(name)) for name in dict.fromkeys(name for name, _ in by)]
    return Measured("test", tuple(systems), by, {})


def of(rows: list[dict], system: str, direction: str) -> dict:
    (row,) = [row for row in rows if (row["system"], row["direction"]) == (system, direction)]
    return row


def test_each_rate_by_hand() -> None:
    made = [
        Decode("<2ru> Download Firefox ESR", "Скачать Firefox ESR", "Скачать Firefox ESR"),
        Decode("<2ru> Good morning", "Доброе утро", "Dobroe utro"),
        Decode("<2ru> Please enter a valid address.", "Введите адрес.",
               "Please  enter a valid ADDRESS."),
        Decode("<2ru> A hotel", "Отель", " \u200b"),
        Decode("<2ru> Well", "Ну", "да, " * 4 + "да, нет"),
    ]  # fmt: skip
    rows = rates.rates(measured({("moe", "en-ru"): made}), None)
    row = of(rows, "moe", "en-ru")
    assert (row["sentences"], row["split"]) == (5, "test")
    # Letters of another script: the second, and the third, which is also a copy.
    assert row["off_script"] == 0.4
    assert (row["copies"], row["empty"], row["loops"]) == (0.2, 0.2, 0.2)
    wanted = sum(len(one.reference) for one in made)
    assert row["length_ratio"] == pytest.approx(
        sum(len(one.hypothesis) for one in made) / wanted, abs=1e-6
    )
    assert (row["off_language"], row["identified"], row["code"]) == (None, 0, None)
    right = of(rows, rates.REFERENCE, "en-ru")
    assert [right[name] for name in ("off_script", "copies", "empty", "loops")] == [0, 0, 0, 0]
    assert right["length_ratio"] == 1
    assert rates.notes(rows) == [rates.NO_IDENTIFIER]
    assert "make langid" in rates.NO_IDENTIFIER


def test_loops_are_those_of_a_loop_over_units_and_places() -> None:
    rng = random.Random(0)
    texts = ["", "x", "ab" * 8, "ab" * 7, "-" * 16, "the cat, " * 3 + "the cat", "日本語" * 6]
    texts += ["".join(rng.choices("ab ", k=rng.randint(0, 60))) for _ in range(300)]
    parts = ("".join(rng.choices("ab ", k=rng.randint(1, 9))) for _ in range(100))
    texts += ["x" + part * rng.randint(1, 9) for part in parts]
    texts += [" " + "abcd efgh ijkl mnop qrst uvwx yz01 2345 6" * 4]  # 41 characters

    def stretch(text: str, start: int, unit: int) -> int:
        end = start + unit
        while end < len(text) and text[end] == text[end - unit]:
            end += 1
        return end - start

    def loops(text: str) -> bool:
        return any(
            stretch(text, start, unit) >= max(16, 4 * unit - 2)
            for unit in range(1, 41)
            for start in range(len(text) - unit)
        )

    found = rates.loops(texts).tolist()
    assert found == [loops(text) for text in texts]
    assert 5 < sum(found) < len(texts)
    assert found[-1] is False
    assert found[:7] == [False, False, True, False, True, True, True]


LONG = "a sentence of enough letters"


def languages() -> Measured:
    """Returns sentences: gl looks like pt once; the system translates into pt and en twice."""
    references = ["[gl] " + LONG] * 9 + ["[pt] " + LONG]
    made = ["[pt] " + LONG] * 2 + ["[en] " + LONG] * 2 + ["[gl] " + LONG] * 5 + ["[gl] short"]
    gl = [Decode("<2gl> x", r, h) for r, h in zip(references, made, strict=True)]
    pt = [Decode("<2pt> x", "[pt] " + LONG, "[pt] " + LONG)] * 2
    eu = [Decode("<2eu> x", LONG, LONG)] * 2
    return measured({("moe", "en-gl"): gl, ("moe", "en-pt"): pt, ("moe", "en-eu"): eu})


def test_wrong_languages_are_counted_next_to_the_errors_on_references() -> None:
    rows = rates.rates(languages(), Words("gl", "pt", "en", "fr"))
    row = of(rows, "moe", "en-gl")
    assert (row["identified"], row["code"]) == (9, "gl")
    assert row["off_language"] == pytest.approx(4 / 9, abs=1e-6)
    assert row["taken_for"] == {"pt": 0.222222, "en": 0.222222}
    right = of(rows, rates.REFERENCE, "en-gl")
    assert (right["off_language"], right["taken_for"]) == (0.1, {"pt": 0.1})
    # Languages are chosen among the run's: none is French, the first of others.
    assert of(rows, "moe", "en-eu")["off_language"] is None
    assert rates.notes(rows)[1:] == ["confused: gl as pt 10%", "not known to it: eu"]


def test_languages_with_one_code_are_one() -> None:
    made = [Decode("x", "[zh] " + LONG, "[zh] " + LONG)] * 2
    rows = rates.rates(
        measured({("moe", "en-zh"): made, ("moe", "en-zh_Hant"): made}), Words("zh", "en")
    )
    assert rates.confused(rows) == ["zh = zh_Hant"]


def test_rows_of_the_same_texts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    first = Words("gl", "pt", "en")
    rows = rates.rates(languages(), first)
    write_jsonl(path, rows)
    again = Words("gl", "pt", "en")
    assert rates.rates(languages(), again, rates.read_rates(path)) == rows
    assert (first.asked > 0, again.asked) == (True, 0)
    # Other translations of one direction, another identifier: counted again.
    other = languages()
    other.decodes["moe", "en-pt"] = other.decodes["moe", "en-pt"][:1]
    changed = Words("gl", "pt", "en")
    assert of(rates.rates(other, changed, rates.read_rates(path)), "moe", "en-pt")["sentences"] == 1
    assert changed.asked == 2
    assert rates.rates(languages(), None, rates.read_rates(path))[0]["off_language"] is None


def test_a_likely_script_that_references_are_not_in_is_not_asked_for() -> None:
    ladino = [Decode("<2lad> Hi", "Esto meldando", "Esto meldando")] * 2
    rows = rates.rates(measured({("moe", "en-lad"): ladino}), None)
    assert {row["off_script"] for row in rows} == {None}


def test_the_table_has_means_of_directions_with_enough_sentences() -> None:
    made = languages()
    made.decodes["moe", "en-pt"] = made.decodes["moe", "en-pt"][:1]
    rows = rates.rates(made, Words("gl", "pt", "en"))
    reference, moe = rates.summary(rows, LEVELS)
    assert (reference["system"], reference["side"], reference["directions"]) == (
        "reference", "en->xx", 2,
    )  # fmt: skip
    assert moe["off_language"] == pytest.approx(4 / 9, abs=1e-6)


@pytest.mark.skipif(not installed(), reason="py3langid is not installed: `make langid`")
def test_the_identifier_chooses_among_the_runs_languages() -> None:
    identifier = Py3langid()
    identifier.choose_among({"de", "en"})
    assert identifier.identify("Das ist ein ganz gewöhnlicher Satz.")[0] == "de"
    assert identifier.identity()["package"] == "py3langid"

"""The ledger adds up, whatever a corpus is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from m4.data.cleaning import clean
from m4.data.cleaning.ledger import ANY, Example, Ledger
from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS, Pair
from m4.data.sources.reading.lines import Reading
from tests.data.cleaning.cases import Listed, run


class OneFile(Listed):
    """Everything is in one file, whose lines are counted whenever it is read."""

    def __init__(self, pairs: dict) -> None:
        super().__init__(pairs)
        self.reading = Reading("OneFile", "skip", 100)

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        yield from super().pairs(language, split)
        with self.reading.of(f"{split}.good", f"{split}.good"):
            pass
        for file, reason, lines in (
            ("all.jsonl", "not JSON", 5),
            (f"{language}.only", "no tab", 2),
        ):
            with self.reading.of(file, file) as tally:
                tally.skipped[reason] = lines


def test_lines_of_a_file_of_several_languages_are_counted_under_a_star(tmp_path: Path) -> None:
    source = OneFile({("gl", "train"): [("a", "b")], ("pt", "train"): [("c", "d")]})
    kept, ledger = run([], source, tmp_path)
    # all.jsonl was read for both languages and all splits, gl.only for all splits of one.
    assert ledger.count(ANY, ANY).as_json() == {
        "read": 5, "kept": 0, "dropped": {"source: not JSON": 5}}  # fmt: skip
    assert [*ledger.counts[ANY]] == [ANY], "nothing of files without such lines"
    assert ledger.count("en-gl", ANY).dropped == {"source: no tab": 2}
    assert ledger.count("en-gl", "train").as_json() == {"read": 1, "kept": 1}
    total = ledger.total()
    assert (total.read, total.kept, sum(total.dropped.values())) == (11, 2, 9)
    assert source.reading.skipped == {("all.jsonl", "not JSON"): 5, ("en-gl.only", "no tab"): 2,
                              ("en-pt.only", "no tab"): 2}  # fmt: skip
    assert ledger.summary() == [
        "9 of 11 training pairs left out: source: not JSON: 5; source: no tab: 4"
    ]
    assert kept["gl", "train"] == [("a", "b")]


def test_the_ledger_of_a_cache_adds_up_to_its_rows(tmp_path: Path) -> None:
    pairs = [(f"word {n}", f"drow {n}") for n in range(60)]
    long = ("12345678901234567890123456789", "x")  # digits are separate pieces
    train = [*pairs, pairs[3], long, ("tested", "y")]
    source = Listed({("gl", "train"): train, ("gl", "test"): [("Tested", "z")]})
    made = CorpusSpec(source, vocabulary_size=320, lengths={"inputs": 24, "targets": 24}).build(
        tmp_path / "c"
    )
    ledger = made.ledger()
    assert ledger.count("en-gl", "train").dropped == {
        "duplicates: exact pair": 1,
        "overlap: first side in test": 1,
        "pieces: too long": 1,
    }
    for split in SPLITS:
        count = ledger.count("en-gl", split)
        assert count.kept == made.size("en-gl", split) == len(list(made.pairs("en-gl", split)))
        assert count.read == count.kept + sum(count.dropped.values())
    assert made.manifest["ledger"] == ledger.as_json(examples=False)


def test_a_language_that_is_cleaned_away_names_the_stages(tmp_path: Path) -> None:
    source = Listed({("ru", "train"): [("a", "b")] * 3})
    with pytest.raises(ValueError, match="en-ru has no training pairs: all 3 are dropped: script:"):
        CorpusSpec(source, vocabulary_size=320, cleaning=clean.thorough()).build(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_ledger_as_json_and_back() -> None:
    ledger = Ledger({"empty": {"a": 1}})
    count = ledger.count("en-gl", "train")
    count.read = count.kept = 9
    count.drop("empty: first side", 4)
    shown = (Example(number, "", "f" * 1000) for number in range(9))
    count.show("empty: first side", shown, 3)
    assert [one[0::2] for one in count.examples["empty: first side"]] == [
        (number, "f" * 299 + "…") for number in range(3)
    ]
    made = ledger.as_json()
    assert Ledger.from_json(json.loads(json.dumps(made))).as_json() == made
    assert "examples" not in json.dumps(ledger.as_json(examples=False))
    ledger.check()
    count.kept += 1
    with pytest.raises(AssertionError):
        ledger.check()

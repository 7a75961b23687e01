"""The ledger adds up, whatever a corpus is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m4.data.cache.identity import differences
from m4.data.cleaning import clean
from m4.data.cleaning.clean import Cleaner
from m4.data.cleaning.ledger import ANY, Example, Ledger
from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS, Pair
from m4.data.sources.tsv import Tsv
from tests.data.cleaning.cases import Listed, run

# A line of each kind -> why the source leaves it out, or None where it is a pair.
KINDS = {
    b"no tab": "no tab",
    b"two\ttabs\there": "more than one tab",
    b"": "an empty line",
    b"\tno English": "an empty English side",
    b"no translation\t ": "an empty translation side",
    b"a NUL\x00 here\tx": "a NUL character",
    b"control\x07 here\tx": "a control character",
    b"not \xff UTF-8\tx": "not UTF-8",
    b"half \xed\xa0\x80 a pair\tx": "not UTF-8",
    b"x" * 70_000 + b"\ty": "longer than 65536 bytes",
    b"good %d\tboa %d": None,
    b"good too %d\tboa %d\r": None,
    b"\xef\xbb\xbfwith a mark %d\tboa %d": None,
    "right to left %d\tשלום\u200f %d".encode(): None,
    "spaced %d\tunha\u2028li\u00f1a %d".encode(): None,
}


def corrupted(lines: int) -> tuple[bytes, dict[str, int], int]:
    """(the file, reason -> lines, good lines): kinds interleaved, the long one seldom."""
    kinds = list(KINDS)
    text, wanted, good = [], dict[str, int](), 0
    for number in range(lines):
        kind = kinds[number % len(kinds)]
        if len(kind) > 60_000 and number % 40:
            kind = b"no tab"
        if (why := KINDS[kind]) is None:
            good += 1
            kind = kind % (number, number)
        else:
            wanted[f"source: {why}"] = wanted.get(f"source: {why}", 0) + 1
        text.append(kind + b"\n")
    return b"".join(text), wanted, good


def test_ten_thousand_corrupted_lines_are_counted_one_by_one(tmp_path: Path) -> None:
    text, wanted, good = corrupted(10_000)
    (tmp_path / "gl.train.tsv").write_bytes(text)
    (tmp_path / "gl.test.tsv").write_bytes(corrupted(300)[0])
    source, spool = Tsv(tmp_path, on_bad_line="skip"), tmp_path / "spool"
    spool.mkdir()
    kept, ledger = run([*clean.thorough().stages], source, spool)
    train, test = ledger.count("gl", "train"), ledger.count("gl", "test")
    assert (train.read, test.read) == (10_000, 300)
    ours = {why: n for why, n in train.dropped.items() if why.startswith("source:")}
    assert ours == wanted
    others = sum(train.dropped.values()) - sum(wanted.values())
    assert len(kept["gl", "train"]) == train.kept == good - others
    assert train.changed["source: a mark of writing direction"] > 0
    assert sum(wanted.values()) + good == 10_000
    # Whoever used the source before: nothing is counted twice or forgotten.
    again = run([*clean.thorough().stages], source, spool)[1]
    assert again.as_json() == ledger.as_json()
    assert sum(source.skipped.values()) == sum(wanted.values()) + sum(
        n for why, n in test.dropped.items()
    )


class OneFile(Listed):
    """Everything is in one file, whose lines are counted whenever it is read."""

    def __init__(self, pairs: dict) -> None:
        super().__init__(pairs)
        self.skipped: dict[tuple[str, str], int] = {}

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        yield from super().pairs(language, split)
        self.skipped |= {("all.jsonl", "not JSON"): 5, (f"{language}.only", "no tab"): 2}


def test_lines_of_a_file_of_several_languages_are_counted_under_a_star(tmp_path: Path) -> None:
    source = OneFile({("gl", "train"): [("a", "b")], ("pt", "train"): [("c", "d")]})
    kept, ledger = run([], source, tmp_path)
    # all.jsonl was read for both languages and all splits, gl.only for all splits of one.
    assert ledger.count(ANY, ANY).as_json() == {
        "read": 5, "kept": 0, "dropped": {"source: not JSON": 5}}  # fmt: skip
    assert ledger.count("gl", ANY).dropped == {"source: no tab": 2}
    assert ledger.count("gl", "train").as_json() == {"read": 1, "kept": 1}
    total = ledger.total()
    assert (total.read, total.kept, sum(total.dropped.values())) == (11, 2, 9)
    assert source.skipped == {("all.jsonl", "not JSON"): 5, ("gl.only", "no tab"): 2,
                              ("pt.only", "no tab"): 2}  # fmt: skip
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
    assert ledger.count("gl", "train").dropped == {
        "duplicates: exact pair": 1,
        "overlap: english side in test": 1,
        "pieces: too long": 1,
    }
    for split in SPLITS:
        count = ledger.count("gl", split)
        assert count.kept == made.size("gl", split) == len(list(made.pairs("gl", split)))
        assert count.read == count.kept + sum(count.dropped.values())
    assert made.manifest["ledger"] == ledger.as_json(examples=False)


def test_settings_of_the_cleaning_are_the_caches_identity(tmp_path: Path) -> None:
    source = Listed({("gl", "train"): [(f"word {n}", f"drow {n}") for n in range(60)]})
    settings: dict[str, Any] = {"vocabulary_size": 320, "lengths": {"inputs": 24, "targets": 24}}
    made = CorpusSpec(source, **settings).build(tmp_path / "c")
    again = CorpusSpec(source, **settings, cleaning=clean.thorough()).build(tmp_path / "c")
    first, *_ = differences(made.manifest["identity"], again.manifest["identity"])
    assert first.startswith(
        "cleaning.order = ['normalise', 'empty', 'duplicates', 'overlap'], now ["
    )
    assert again.manifest["corpus"] == made.manifest["corpus"]


def test_a_language_that_is_cleaned_away_names_the_stages(tmp_path: Path) -> None:
    source = Listed({("ru", "train"): [("a", "b")] * 3})
    with pytest.raises(ValueError, match="'ru' has no training pairs: all 3 are dropped: script:"):
        CorpusSpec(source, vocabulary_size=320, cleaning=clean.thorough()).build(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_ledger_as_json_and_back() -> None:
    _, ledger = _with_examples()
    text = json.dumps(ledger.as_json())
    assert Ledger.from_json(json.loads(text)).as_json() == ledger.as_json()
    assert "examples" not in json.dumps(ledger.as_json(examples=False))
    assert ledger.as_json()["stages"] == {"empty": {"a": 1}}


def test_examples_are_few_and_short() -> None:
    count, _ = _with_examples()
    assert [example.number for example in count.examples["empty: english side"]] == [0, 1, 2]
    assert len(count.examples["empty: english side"][0].translation) == 300


def _with_examples():
    ledger = Ledger({"empty": {"a": 1}})
    count = ledger.count("gl", "train")
    count.read = count.kept = 9
    count.drop("empty: english side", 4)
    shown = (Example(number, "", "f" * 1000) for number in range(9))
    count.show("empty: english side", shown, 3)
    return count, ledger


def test_a_ledger_that_does_not_add_up_is_found() -> None:
    count, ledger = _with_examples()
    ledger.check()
    count.kept += 1
    with pytest.raises(AssertionError):
        ledger.check()


def test_real_text_is_cleaned_a_little(tatoeba: Path, tmp_path: Path) -> None:
    codes = ["gle", "cmn_Hant", "heb", "uzb"]
    source = Tsv(tatoeba, on_bad_line="skip")
    cleaner = Cleaner(clean.thorough(), source, codes, tmp_path)
    for split in reversed(SPLITS):
        for code in codes:
            assert np.all([len(part) for part in cleaner.pairs(code, split)])
    ledger = cleaner.finish()
    for code in codes:
        count = ledger.count(code, "train")
        lines = (tatoeba / f"{code}.train.tsv").read_bytes().count(b"\n")
        assert count.read == lines
        english = [why for why in count.dropped if why.startswith("overlap: english")]
        assert not english, "its splits are by the English side"
    # Uzbek is written in Latin letters and in Cyrillic; its code says neither, m4's table Latin.
    assert ledger.count("uzb", "train").dropped["script: translation side"] > 50
    assert ledger.count("heb", "train").kept > 0.98 * ledger.count("heb", "train").read

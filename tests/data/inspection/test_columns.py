"""Columns that are the wrong way round are found, those that are right never."""

from __future__ import annotations

from pathlib import Path

import pytest

from m4.data.cleaning.chunk import chunks
from m4.data.corpus import CorpusSpec
from m4.data.inspection import audit
from m4.data.inspection.columns import Columns
from m4.data.sources import SPLITS, Pair
from m4.data.sources.cldr import Cldr
from m4.data.sources.tsv import Tsv
from tests.jobs.new import folders


def columns_of(texts: dict[str, list[Pair]]) -> Columns:
    made = Columns()
    for language, pairs in texts.items():
        for chunk in chunks(pairs, 30):
            made.add(language, "train", chunk)
    return made


def test_the_audit_names_languages_whose_columns_are_reversed(tmp_path: Path) -> None:
    source = Tsv(folders.tsv(tmp_path / "corpus", swapped="gl"))
    ledger = audit.audit(CorpusSpec(source), tmp_path)
    assert ledger.count("gl", "train").flagged[audit.REVERSED] == 82
    assert [code for code in ledger.counts if ledger.count(code, "train").flagged] == ["gl"]
    (said,) = [line for line in audit.warnings(ledger) if "English is on" in line]
    assert said == (
        "Galician (gl): English is on the side of the translations in train, dev, test: swap the "
        "columns (TSV: Tsv.english_column = 2)"
    )
    swapped = Tsv(folders.tsv(tmp_path / "swapped", swapped="gl fy pt"), english_column=2)
    right = audit.audit(CorpusSpec(swapped), tmp_path)
    assert not right.total().flagged[audit.REVERSED]
    assert next(iter(swapped.pairs("gl", "test"))) == folders.pairs("gl")[0]
    assert swapped.identity() != Tsv(tmp_path / "swapped").identity()


def test_english_sentences_that_several_languages_share_suffice() -> None:
    texts = {code: [Pair(f"w{n}", f"{code}{n}") for n in range(40)] for code in ("gl", "fy", "pt")}
    texts["pt"] = [Pair(b, a) for a, b in texts["pt"]]
    made = columns_of(texts)
    assert made.reversed() == [("pt", "train")]
    assert made.right() == [("gl", "train"), ("fy", "train")]


def test_english_words_suffice_for_a_language_alone() -> None:
    pairs = [Pair(*pair) for pair in folders.pairs("gl")]
    assert columns_of({"gl": pairs}).right() == [("gl", "train")]
    assert columns_of({"gl": [Pair(b, a) for a, b in pairs]}).reversed() == [("gl", "train")]


def test_of_text_that_says_nothing_nothing_is_said() -> None:
    same = {code: [Pair(f"w{n}", f"w{n}") for n in range(40)] for code in ("gl", "fy")}
    made = columns_of(same)
    assert (made.right(), made.reversed()) == ([], [])
    assert Columns().reversed() == []


def test_no_language_of_the_embedded_corpus_is_taken_for_reversed() -> None:
    source = Cldr({"hr": 300, "bs": 300, "sr_Latn": 300, "de": 300, "ru": 300, "ja": 300})
    made = Columns()
    for code in source.languages():
        for split in SPLITS:
            for chunk in chunks(source.pairs(code, split)):
                made.add(code, split, chunk)
    assert made.reversed() == []
    assert {code for code, split in made.right() if split == "train"} == {*source.languages()}


def test_no_language_of_real_text_is_taken_for_reversed(tatoeba: Path) -> None:
    made = Columns()
    source = Tsv(tatoeba, on_bad_line="skip")
    for code in source.languages()[::6]:
        for chunk in chunks(source.pairs(code, "train")):
            made.add(code, "train", chunk)
    assert made.reversed() == []


@pytest.mark.parametrize("line", ["a\tb\n", "a b\n"])
def test_bad_lines_of_swapped_columns_are_counted_as_ever(line: str, tmp_path: Path) -> None:
    (tmp_path / "gl.train.tsv").write_text(f"b\ta\n{line}", encoding="utf-8")
    source = Tsv(tmp_path, on_bad_line="skip", english_column=2)
    first, *_ = source.pairs("gl", "train")
    assert first.english == "a"
    assert [*source.reading.places.values()] == ([[2]] if line == "a b\n" else [])

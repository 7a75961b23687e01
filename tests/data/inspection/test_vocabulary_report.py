from __future__ import annotations

from pathlib import Path

import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.directions import key_of
from m4.data.inspection.vocabulary_report import measure, measure_texts
from tests.data.corpus import Made


def test_rates_by_hand(made_cache: Cache) -> None:
    """'the red' is two pieces; 漢 is none of the vocabulary's characters: ▁ and three bytes."""
    encoder = made_cache.source_vocabulary
    assert [len(ids) for ids in made_cache.source_vocabulary.encode(["the red", "漢"])] == [2, 4]
    row = measure_texts(encoder, "shared", "gl", ["the red", "漢"])
    assert row[2:] == pytest.approx((2, 6 / 2, 6 / 3, 6 / 7, 3 / 6, 0, 6 / 7))


def test_characters_are_counted_as_the_vocabulary_sees_them(made_cache: Cache) -> None:
    # The ligature is one character; the wide space is a space.
    row = measure_texts(made_cache.source_vocabulary, "shared", "gl", ["ﬁ\u3000sh"])
    assert row.pieces_per_word / row.pieces_per_character == pytest.approx(3 / 2)


def test_rows_are_the_pieces_of_the_cache(made_cache: Cache) -> None:
    rows = {row.language: row for row in measure(made_cache, sentences=10_000)}
    assert list(rows) == ["en", "gl", "pt", "sr_Latn"]
    for code in made_cache.language_pairs():
        mean = made_cache.mean_pieces(code, "train")[1]
        code = key_of(code)
        assert rows[code].sentences == made_cache.size(code, "train")
        assert rows[code].pieces_per_sentence == pytest.approx(mean, abs=1e-3)
        assert rows[code].coverage == 1
    assert rows["en"].sentences == 300 + 90 + 31
    few = {row.language: row for row in measure(made_cache, sentences=30)}
    assert [row.sentences for row in few.values()] == [30, 30, 30, 30]


def test_separate_vocabularies_are_asked_for_their_own_languages(tmp_path: Path) -> None:
    made = CorpusSpec(
        Made({"gl": 60, "pt": 30}),
        mixture="to_english",
        vocabulary_size=400,
        target_vocabulary_size=350,
    ).build(tmp_path / "c")
    rows = [(row.vocabulary, row.language) for row in measure(made)]
    assert rows == [("source", "gl"), ("source", "pt"), ("target", "en")]

"""Looking words up gives the ids of tokenizing whole texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m4.data import words
from m4.data.cache import Cache
from m4.data.sources.tsv import Tsv
from m4.data.words import Ragged, WordEncoder

# What normalization changes, joins or drops, beside letters and the signs of pieces.
ODD = [
    *" ab1２ﬁÅ▁<>\t\0\x7f\xad\xa0\u3000\u200b\u2028\ufeff",
    "\u0301",  # combining acute
    "\u00a8",  # a space and a combining diaeresis, in compatibility form
    "\u0344\u1fc1\u064c\u0651\ufc5e\u1112\u1161한漢🙂",
    "<2gl>",
    "▁<2gl>",
    "</s>",
]


def same(ragged: Ragged, wanted: list[list[int]]) -> bool:
    other = Ragged.of(wanted)
    return all(np.array_equal(a, b) for a, b in zip(ragged, other, strict=True))


@settings(deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=12).map("".join)
    )
)
def test_words_are_the_text(made_cache: Cache, texts: list[str]) -> None:
    vocabulary = made_cache.source_vocabulary
    assert same(WordEncoder(vocabulary).encode(texts), vocabulary.encode(texts))


def test_what_is_known_stays_right(made_cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 40)  # forgets now and then
    vocabulary = made_cache.source_vocabulary
    encoder = WordEncoder(vocabulary)
    texts = [pair.foreign for pair in made_cache.pairs("gl", "train")]
    for start in range(0, 300, 30):
        part = texts[start : start + 30]
        assert same(encoder.encode(part), vocabulary.encode(part))


def test_real_text(tatoeba: Path, made_cache: Cache) -> None:
    vocabulary = made_cache.source_vocabulary
    encoder, source = WordEncoder(vocabulary), Tsv(tatoeba)
    for code in source.languages():
        texts = [side for pair in source.pairs(code, "dev") for side in pair]
        assert same(encoder.encode(texts), vocabulary.encode(texts)), code


def test_a_vocabulary_with_a_space_inside_a_piece_gets_whole_texts(
    made_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = made_cache.source_vocabulary
    assert vocabulary.by_words
    monkeypatch.setattr(vocabulary, "by_words", False)
    encoder = WordEncoder(vocabulary)
    asked: list[list[str]] = []
    encode = type(vocabulary).encode
    monkeypatch.setattr(vocabulary, "encode", lambda t: asked.append([*t]) or encode(vocabulary, t))
    encoder.encode(["the red river", "a bird"])
    assert asked == [["the red river", "a bird"]]


def test_ragged_rows() -> None:
    ragged = Ragged.of([[1, 2], [], [3]])
    assert same(ragged.take(np.array([2, 0, 1, 0])), [[3], [1, 2], [], [1, 2]])
    assert same(ragged.take(np.array([], np.int64)), [])
    assert same(Ragged.joined([ragged, ragged]), [[1, 2], [], [3], [1, 2], [], [3]])

"""A stretch of a text file becomes the ids of its lines."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.vocabulary import Ragged
from m4.data.vocabulary.tokenizing import Dropout, RangeTokenizer, TextRange, TokenArray

# What normalization changes, joins or drops, in addition to letters and the signs of pieces.
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


# Texts of letters that come again, so that words do, with spaces at ends and in a row.
FEW = st.lists(st.sampled_from([*"aab   漢", "é", "\u0301", "\u00a0"]), max_size=30).map("".join)
# Lone surrogates are no text: SentencePiece refuses them.
ANY = st.lists(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=12).map("".join)


@given(
    texts=st.lists((ANY | FEW).map(lambda text: re.sub("[\t\n]", "", text))), cut=st.integers(0, 20)
)
def test_a_range_is_its_lines(
    made_cache: Cache, tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int
) -> None:
    """Two stretches of a file against its lines one by one."""
    vocabulary = made_cache.source_vocabulary
    path = tmp_path_factory.mktemp("spans") / "train.gl.txt"
    lines = [f"{text}\n".encode() for text in texts]
    path.write_bytes(b"".join(lines))
    cut = len(b"".join(lines[:cut]))
    tokenizer = RangeTokenizer([TokenArray("first", vocabulary.path, 9)], 1, None)
    spans = (0, cut), (cut, path.stat().st_size)
    parts = [tokenizer(TextRange(path, start, stop, train=True))[""] for start, stop in spans]
    found = Ragged.joined([way for ways in parts for way in ways])
    assert same(found, vocabulary.encode(texts))


def test_ragged_rows() -> None:
    ragged = Ragged.of([[1, 2], [], [3]])
    assert same(ragged.take(np.array([2, 0, 1, 0])), [[3], [1, 2], [], [1, 2]])
    assert same(ragged.take(np.array([], np.int64)), [])
    assert same(Ragged.joined([ragged, ragged]), [[1, 2], [], [3], [1, 2], [], [3]])


# BPE-dropout: at 0 it is SentencePiece's own segmentation, at 1 it is characters.


@pytest.fixture(scope="module")
def dropout(made_cache: Cache) -> Dropout:
    return Dropout(made_cache.source_vocabulary)


def seeds(ragged: Ragged, seed: int) -> np.ndarray:
    """Returns a seed for each text."""
    return np.random.default_rng(seed).integers(0, 2**64, len(ragged.lengths), np.uint64)


@given(texts=st.lists(ANY))
def test_without_dropout_it_is_the_best_segmentation(
    made_cache: Cache, dropout: Dropout, texts: list[str]
) -> None:
    best = Ragged.of(made_cache.source_vocabulary.encode(texts))
    assert same(best, dropout.sample(best, 0.0, seeds(best, 3)).rows())


def test_with_nothing_but_dropout_it_is_characters(made_cache: Cache, dropout: Dropout) -> None:
    vocabulary = made_cache.source_vocabulary
    texts = ["the red bird", "12 stones", "漢"]
    best = Ragged.of(vocabulary.encode(texts))
    spelled = [
        [vocabulary.pieces[i] for i in ids]
        for ids in dropout.sample(best, 1.0, seeds(best, 5)).rows()
    ]
    assert spelled[:2] == [[*"▁the▁red▁bird"], [*"▁12▁stones"]]
    assert spelled[2] == ["▁", "<0xE6>", "<0xBC>", "<0xA2>"], "bytes stay"


def test_every_way_spells_the_text(made_cache: Cache, dropout: Dropout) -> None:
    vocabulary = made_cache.source_vocabulary
    texts = [pair.second for pair in made_cache.pairs("en-gl", "train")]
    best = Ragged.of(vocabulary.encode(texts))
    one, other = (dropout.sample(best, 0.3, seeds(best, seed)) for seed in (1, 2))
    for ways in (one, other):
        assert vocabulary.decode(ways.rows()) == texts
        assert len(ways.ids) > len(best.ids)
    assert not np.array_equal(one.ids, other.ids)


def test_how_often_a_merge_is_left_out(made_cache: Cache, dropout: Dropout) -> None:
    """The first step of a word of two characters: its one merge is left out in alpha of them."""
    vocabulary = made_cache.source_vocabulary
    number = 20_000
    best = Ragged.of(vocabulary.encode(["a"]) * number)
    assert len(best.ids) == number, "'▁a' is one piece"
    left_out = dropout.sample(best, 0.25, seeds(best, 11)).lengths - 1
    # 4 sigma of a binomial draw
    assert abs(left_out.sum() - 0.25 * number) < 4 * (number * 0.25 * 0.75) ** 0.5

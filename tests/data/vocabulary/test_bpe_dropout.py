"""BPE-dropout: at 0 it is SentencePiece's own segmentation, at 1 it is characters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.vocabulary.bpe_dropout import Dropout
from m4.data.vocabulary.ragged import Ragged
from tests.data.vocabulary.test_tokenizing import ODD, same


@pytest.fixture(scope="module")
def dropout(made_cache: Cache) -> Dropout:
    return Dropout(made_cache.source_vocabulary)


def seeds(ragged: Ragged, seed: int) -> np.ndarray:
    """A seed for each text."""
    return np.random.default_rng(seed).integers(0, 2**64, len(ragged.lengths), np.uint64)


# Lone surrogates are no text: SentencePiece refuses them.
LETTERS = st.sampled_from(ODD) | st.characters(codec="utf-8")


@settings(deadline=None)
@given(texts=st.lists(st.lists(LETTERS, max_size=12).map("".join)))
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


def test_a_text_has_the_same_ways_wherever_it_stands(made_cache: Cache, dropout: Dropout) -> None:
    texts = [pair.first for pair in made_cache.pairs("en-gl", "train")]
    best = Ragged.of(made_cache.source_vocabulary.encode(texts))
    every, of = dropout.sample(best, 0.3, seeds(best, 4)), seeds(best, 4)
    some = np.array([5, 0, 17])
    assert same(dropout.sample(best.take(some), 0.3, of[some]), every.take(some).rows())

"""Plain words get SentencePiece's ids without it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.vocabulary.spelling import Spelling
from tests.data.vocabulary.test_word_cache import ODD, same

LETTERS = st.sampled_from([*"abcderinost", *ODD]) | st.characters(codec="utf-8")


@settings(deadline=None)
@given(words=st.lists(st.lists(LETTERS, max_size=12).map("".join), min_size=1))
def test_plain_words_are_the_vocabularys(made_cache: Cache, words: list[str]) -> None:
    vocabulary = made_cache.source_vocabulary
    words = " ".join(words).split(" ")
    found, plain = Spelling(vocabulary).encode("".join(f" {word}" for word in words))
    assert len(plain) == len(words)
    assert same(found, vocabulary.encode([w for w, is_ in zip(words, plain, strict=True) if is_]))


def test_what_is_plain(made_cache: Cache) -> None:
    """The words of the corpus, and nothing that normalization, tags or bytes have a say in."""
    vocabulary = made_cache.source_vocabulary
    spelling = Spelling(vocabulary)
    text = [pair.foreign for pair in made_cache.pairs("gl", "train")]
    words = sorted({word for line in text for word in line.split(" ")})
    found, plain = spelling.encode("".join(f" {word}" for word in words))
    assert plain.all()
    assert same(found, vocabulary.encode(words))
    odd = ["", "<2gl>", "e\u0301", "ﬁ", "a\u00a0b", "漢", "a\u200d", "２"]
    found, plain = spelling.encode("".join(f" {word}" for word in odd))
    assert not plain.any()
    assert same(found, [])

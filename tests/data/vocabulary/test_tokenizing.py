"""A stretch of a text file becomes the ids of its lines."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m4.data.cache.cache import Cache
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.tokenizing import RangeTokenizer, TextRange, TokenArray

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
ANY = st.lists(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=12).map("".join)


@settings(deadline=None)
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

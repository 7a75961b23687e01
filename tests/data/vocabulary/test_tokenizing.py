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
    pairs=st.lists(
        st.tuples(ANY | FEW, ANY | FEW).map(
            lambda pair: tuple(re.sub("[\t\n]", "", side) for side in pair)
        )
    ),
    cut=st.integers(0, 20),
)
def test_a_range_is_its_lines(
    made_cache: Cache, tmp_path_factory: pytest.TempPathFactory, pairs: list, cut: int
) -> None:
    """Two stretches of a file against its lines one by one: ids, and which pairs are left out."""
    vocabulary, longest = made_cache.source_vocabulary, 9
    path = tmp_path_factory.mktemp("spans") / "train.gl.tsv"
    lines = [f"{english}\t{translation}\n".encode() for english, translation in pairs]
    path.write_bytes(b"".join(lines))
    cut = len(b"".join(lines[:cut]))
    ids = [vocabulary.encode(pair) for pair in pairs]
    fit = [max(map(len, sides)) <= longest for sides in ids]
    tokenizer = RangeTokenizer(
        [TokenArray(side, side, vocabulary.path, longest) for side in ("first", "second")],
        1,
        None,
    )
    for train in (True, False):
        parts = [
            tokenizer(TextRange(path, start, stop, train))
            for start, stop in ((0, cut), (cut, path.stat().st_size))
        ]
        kept = [number for number in range(len(pairs)) if fit[number] or not train]
        assert b"".join(part.text for part in parts) == b"".join(lines[n] for n in kept)
        assert sum(part.pairs for part in parts) == len(kept)
        assert sum(part.too_long for part in parts) == fit.count(False)
        for i, side in enumerate(("first", "second")):
            found = Ragged.joined([part.arrays[side][0] for part in parts])
            assert same(found, [ids[n][i] for n in kept])


def test_ragged_rows() -> None:
    ragged = Ragged.of([[1, 2], [], [3]])
    assert same(ragged.take(np.array([2, 0, 1, 0])), [[3], [1, 2], [], [1, 2]])
    assert same(ragged.take(np.array([], np.int64)), [])
    assert same(Ragged.joined([ragged, ragged]), [[1, 2], [], [3], [1, 2], [], [3]])

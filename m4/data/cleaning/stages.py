"""The simple stages: empty, length, identical, duplicates and length_ratio."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from m4.data.arrays import U64, Mask
from m4.data.cleaning import CleaningStage, Findings, Opened
from m4.data.cleaning.chunk import Chunk, both
from m4.data.directions import SIDES
from m4.settings import Between, OneOf, checked, configurable

# Letters that are invisible.
_FILLERS = "\u115f\u1160\u3164\uffa0"
_VISIBLE = re.compile(
    "[^\\s\x00-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180b-\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0]"
)


def is_empty(text: str) -> bool:
    """Returns whether a text has no visible character."""
    # Most sentences begin with a letter, so checking the first character is enough.
    if text[:1].isalnum() and text[0] not in _FILLERS:
        return False
    return _VISIBLE.search(text) is None


@configurable
@dataclass(frozen=True)
class Empty(CleaningStage):
    """Drops a pair with a side of white space and invisible characters only."""

    name: ClassVar[str] = "empty"

    def check(self, chunk: Chunk) -> Findings:
        return Findings({f"{s} side": np.array([*map(is_empty, chunk.side(s))]) for s in SIDES})


@checked
@dataclass(frozen=True)
class Length(CleaningStage):
    """Drops a pair with a long side.

    Sentences with too many pieces are dropped at tokenization in any case (CorpusSpec.lengths);
    this stage saves the work, and drops whole paragraphs.

    Attributes:
        most_characters: Maximum number of characters of a side.
    """

    name: ClassVar[str] = "length"
    most_characters: Annotated[int, Between(1, 10**9)] = 1000

    def check(self, chunk: Chunk) -> Findings:
        return Findings({f"{s} side": chunk.lengths(s) > self.most_characters for s in SIDES})


@checked
@dataclass(frozen=True)
class Identical(CleaningStage):
    """Drops a pair whose sides are equal up to case, width and spacing.

    Attributes:
        name_words: Maximum words of sides that stay, as names, numbers and titles may be equal.
    """

    name: ClassVar[str] = "identical"
    name_words: Annotated[int, Between(0, 10**6)] = 3

    def check(self, chunk: Chunk) -> Findings:
        same = chunk.normal_digests("first") == chunk.normal_digests("second")
        for row in np.flatnonzero(same):
            same[row] = len(chunk.first[row].split()) > self.name_words
        return Findings({"both sides": same})


@checked
@dataclass(frozen=True)
class Duplicates(CleaningStage):
    """Keeps only the first of equal pairs of two languages and a split.

    It takes 8 bytes of memory per pair, or 16 with `normalised`.

    Attributes:
        by: "pair" compares both sides, "first" or "second" only that side, which leaves one
            translation per sentence.
        normalised: Whether to drop also pairs that differ only in case, width and spacing.
    """

    name: ClassVar[str] = "duplicates"
    by: Annotated[str, OneOf(("pair", "first", "second"))] = "pair"
    normalised: bool = False

    def open(self, language_pairs: Sequence[str]) -> Opened:
        return lambda pair, split: self

    def keys(self, chunk: Chunk) -> list[U64]:
        kinds = [chunk.digests, chunk.normal_digests] if self.normalised else [chunk.digests]
        if self.by == "pair":
            return [both(digests("first"), digests("second")) for digests in kinds]
        return [digests(self.by) for digests in kinds]

    def judge(self, chunk: Chunk, repeated: Sequence[Mask]) -> Findings:
        what = "pair" if self.by == "pair" else f"{self.by} side"
        drop = {f"exact {what}": repeated[0]}
        if self.normalised:
            drop[f"normalised {what}"] = repeated[1] & ~repeated[0]
        return Findings(drop)


@checked
@dataclass(frozen=True)
class LengthRatio(CleaningStage):
    """Drops a pair whose second side is more than `bound` times too long or too short.

    A Chinese sentence has a quarter of the characters of an English one, so the expected ratio is
    the median of second / first over the languages' own pairs. `slack`, in characters of the first
    side, is added to both sides (times the median to the second), so that a few characters do not
    make a bad ratio in a short sentence:

        r = (second / median + slack) / (first + slack), kept if 1/bound <= r <= bound.

    Languages with fewer than `fewest` pairs have no reliable median and are not checked.

    Attributes:
        bound: Largest allowed ratio.
        slack: Number of characters of the first side that is added to both.
        fewest: Least number of pairs of two languages that are checked.
    """

    name: ClassVar[str] = "length_ratio"
    bound: Annotated[float, Between(1, 1e6)] = 2.5
    slack: Annotated[float, Between(0, 1e6)] = 10.0
    fewest: Annotated[int, Between(1, 10**9)] = 50

    def open(self, language_pairs: Sequence[str]) -> Opened:
        return lambda pair, split: self

    def measure(self, chunk: Chunk) -> Counter[float]:
        first, second = chunk.lengths("first"), chunk.lengths("second")
        there = (first > 0) & (second > 0)
        ratios = (second[there] / first[there]).astype(np.float32)
        return Counter(ratios.tolist())

    def fit(self, counts: Counter[float]) -> float | None:
        # The median of the distinct ratios of small numbers, far fewer than pairs.
        if (pairs := counts.total()) < self.fewest:
            return None
        ratios = np.array(sorted(counts), np.float32)
        ends = np.cumsum([counts[ratio] for ratio in ratios.tolist()])
        middle = np.searchsorted(ends, [(pairs - 1) // 2, pairs // 2], side="right")
        return float(np.median(ratios[middle]))

    def judge(self, chunk: Chunk, fitted: float | None) -> Findings:
        if fitted is None:
            few = f"fewer than {self.fewest} pairs"
            return Findings(not_checked={few: np.ones(len(chunk), bool)})
        first, second = chunk.lengths("first"), chunk.lengths("second")
        wanted, got = first + self.slack, second / fitted + self.slack
        return Findings(
            {"second side too long": got > self.bound * wanted,
             "second side too short": wanted > self.bound * got}
        )  # fmt: skip

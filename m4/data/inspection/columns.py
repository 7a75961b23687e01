"""Which side of a corpus is English: its words say so, and that several languages share it."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import numpy.typing as npt

from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES

_Digests = npt.NDArray[np.uint64]
# Of each side the smallest digests: of the same sentences, whatever else is there.
_SENTENCES, _WORDS = 4096, 20_000
# Words that few other languages have.
_LISTED = (
    "the and you that she they what this with are was were your his her not which when would there "
    "from it's i'm don't can could my has had been their will him who how why"
)
_ENGLISH = frozenset(_LISTED.split())
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
# One side has so much more of what is English than the other; and so much at least.
_TIMES, _LEAST_SHARED, _LEAST_WORDS, _LEAST_RATE = 2, 10, 50, 0.04


class Columns:
    """Looks at pairs as they are read, and then says of each language and split which side is
    English.

    A sentence that stands with several languages is English: corpora around English translate the
    same sentences. And English has English words. Where both say nothing, or not the same, nothing
    is said.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[str, str, str], _Digests] = {}
        self._words: Counter[tuple[str, str, str]] = Counter()
        self._english: Counter[tuple[str, str, str]] = Counter()

    def add(self, language: str, split: str, chunk: Chunk) -> None:
        """Pairs of a language and split, in chunks of any size."""
        for side in SIDES:
            key = (language, split, side)
            kept = self._digests.get(key, np.zeros(0, np.uint64))
            self._digests[key] = np.union1d(kept, chunk.normal_digests(side))[:_SENTENCES]
            if self._words[key] < _WORDS:
                words = _WORD.findall(" ".join(chunk.side(side)).casefold().replace("’", "'"))
                self._words[key] += len(words)
                self._english[key] += sum(word in _ENGLISH for word in words)

    def right(self) -> list[tuple[str, str]]:
        """(language, split) of those whose English side is English."""
        return [of for of, side in self._english_sides().items() if side == SIDES[0]]

    def reversed(self) -> list[tuple[str, str]]:
        """(language, split) of those whose translations are English."""
        return [of for of, side in self._english_sides().items() if side == SIDES[1]]

    def _english_sides(self) -> dict[tuple[str, str], str]:
        """(language, split) -> the side that is English, of those where something is said."""
        parts = dict.fromkeys(key[:2] for key in self._digests)
        shared = self._shared()
        found = {}
        for part in parts:
            english, translation = ((*part, side) for side in SIDES)
            said = (
                _more(shared[english], shared[translation], _LEAST_SHARED),
                _more(self._rate(english), self._rate(translation), _LEAST_RATE),
            )
            sides = {side for side in said if side is not None}
            if len(sides) == 1:
                found[part] = sides.pop()
        return found

    def _rate(self, key: tuple[str, str, str]) -> float:
        """The share of a side's words that are English; of too few words 0."""
        return self._english[key] / self._words[key] if self._words[key] >= _LEAST_WORDS else 0.0

    def _shared(self) -> dict[tuple[str, str, str], int]:
        """(language, split, side) -> how many of its sentences stand with other languages too, on
        whichever side."""
        result = {}
        for split in dict.fromkeys(key[1] for key in self._digests):
            sides = {key: kept for key, kept in self._digests.items() if key[1] == split}
            by_language: dict[str, _Digests] = {}
            for (language, *_), kept in sides.items():
                both = by_language.get(language, np.zeros(0, np.uint64))
                by_language[language] = np.union1d(both, kept)
            known, counts = np.unique(np.concatenate([*by_language.values()]), return_counts=True)
            for key, kept in sides.items():
                result[key] = int((counts[np.searchsorted(known, kept)] > 1).sum())
        return result


def _more(english: float, translation: float, least: float) -> str | None:
    """The side that has clearly more; None: neither."""
    if max(english, translation) < least:
        return None
    if english >= _TIMES * translation:
        return SIDES[0]
    return SIDES[1] if translation >= _TIMES * english else None

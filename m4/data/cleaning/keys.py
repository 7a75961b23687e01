"""Compares sentences by 64 bits of their text, and keeps sets of these.

Among n different sentences, two have the same 64 bits with a probability of about n^2 / 2^65: one
in 4,000 for a hundred million.
"""

import sys
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.permutation import GOLDEN, mix
from m4.data.splits import normal

U64 = npt.NDArray[np.uint64]
_LINE_END, _SPACE = 0x0A, 0x20


def normal_digests(texts: Sequence[str]) -> U64:
    """Returns [n] 64 bits of each text's `normal` form, computed for many texts at once."""
    joined = "\n".join([unicodedata.normalize("NFKC", text) for text in texts]).casefold()
    points = code_points(joined)
    ends = np.append(np.flatnonzero(points == _LINE_END), len(points))
    if len(ends) != len(texts) or _spacing_matters(points):
        return digests([normal(text) for text in texts])
    starts = np.append(0, ends[:-1] + 1)
    return _digests(points, starts, ends)


def digests(texts: Sequence[str]) -> U64:
    """Returns [n] 64 bits of each text: the sum over its characters of mix(character, place).

    Each term is its own random number (splitmix64), so that different texts have sums as different
    as random numbers. They are equal on every machine.
    """
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    return _digests(code_points("".join(texts)), np.append(0, ends[:-1]), ends)


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Returns the [characters] of a text, halves of surrogate pairs too."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _digests(
    points: npt.NDArray[np.uint32], starts: npt.NDArray[Any], ends: npt.NDArray[Any]
) -> U64:
    """Returns [n] 64 bits of the texts points[starts[i] : ends[i]], which are in order."""
    if not len(starts):
        return np.zeros(0, np.uint64)
    # Places count from the start of the text. No sum takes in the terms between texts.
    sizes = np.diff(np.append(starts, len(points)))
    places = np.arange(1, len(points) + 1, dtype=np.uint64)
    places -= np.repeat(starts.astype(np.uint64), sizes)
    places *= GOLDEN
    places += points
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum(mix(places), out=sums[1:])  # modulo 2^64, so that differences are exact
    return mix(sums[ends] - sums[starts])


def _spacing_matters(points: npt.NDArray[np.uint32]) -> bool:
    """Returns whether " ".join(text.split()) would change one of the texts."""
    blank = _blanks()[points]
    # A blank next to another one or at an end; or one that is no plain space.
    edge = np.concatenate([[True], blank, [True]])
    alone = ~edge[:-2] & ~edge[2:]
    return bool((blank & (points != _LINE_END) & ~(alone & (points == _SPACE))).any())


@lru_cache(maxsize=1)
def _blanks() -> npt.NDArray[np.bool_]:
    """Returns [0x110000]: whether str.split() takes a character for white space."""
    table = np.zeros(sys.maxunicode + 1, bool)
    table[[n for n in range(0x3001) if chr(n).isspace()]] = True
    return table


def both(english: U64, translation: U64) -> U64:
    """Returns [n] 64 bits of each pair, from those of its sides."""
    return mix(english * np.uint64(3) + mix(translation))


class Digests:
    """A growing set of 64-bit numbers, 8 bytes each: sorted runs, each at most half the one before.

    Python's own sets need about 70 bytes a number.
    """

    def __init__(self) -> None:
        self._runs: list[U64] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def contains(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Returns [n]: whether each number was added before."""
        found = np.zeros(len(numbers), bool)
        for run in self._runs:
            place = np.searchsorted(run, numbers)
            found |= run[np.minimum(place, len(run) - 1)] == numbers
        return found

    def add(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Adds numbers; returns [n]: whether each was new, only the first of equal ones."""
        unique, first = np.unique(numbers, return_index=True)
        fresh = ~self.contains(unique)
        new = np.zeros(len(numbers), bool)
        new[first[fresh]] = True
        run = unique[fresh]
        if len(run):
            while self._runs and len(self._runs[-1]) <= 2 * len(run):
                run = np.concatenate([self._runs.pop(), run])
                run.sort(kind="stable")  # two sorted runs: merged in linear time
            self._runs.append(run)
        return new

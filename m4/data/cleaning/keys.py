"""What sentences are compared by: their normal form, 64 bits of it, and sets of these.

With n different sentences, two of them have the same 64 bits with a chance of about n^2 / 2^65: one
in 4,000 for a hundred million.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from m4.data.permutation import mix

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# White space that " ".join(text.split()) would change, in sentences joined by line ends.
_SPACING = re.compile(r"[^\S \n]|  | \n|\n |^ | $|[\x1c-\x1f]")


def normal(text: str) -> str:
    """A sentence without what does not tell sentences apart: case, width and spacing."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def comparable(texts: Sequence[str]) -> list[str]:
    """`normal` of each text; quick, because whole chunks go through Unicode's tables at once."""
    joined = "\n".join(texts)
    if joined.count("\n") != len(texts) - 1:  # a line end inside a sentence
        return [normal(text) for text in texts]
    joined = unicodedata.normalize("NFKC", joined).casefold()
    result = joined.split("\n")
    if _SPACING.search(joined):
        result = [" ".join(text.split()) for text in result]
    return result


def normal_digests(texts: Sequence[str]) -> U64:
    """[n] 64 bits of each text's normal form."""
    return digests(comparable(texts))


def digests(texts: Sequence[str]) -> U64:
    """[n] 64 bits of each text: the sum over its characters of mix(character, place).

    Each term is a random number of its own (splitmix64), so that different texts have sums as
    different as random numbers. The same on every machine, and numpy does a chunk at once.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    if not len(points):
        return np.zeros(len(texts), np.uint64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    places = np.arange(len(points)) - np.repeat(starts, lengths)
    terms = mix(points.astype(np.uint64) + (places + 1).astype(np.uint64) * _GOLDEN)
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum(terms, out=sums[1:])  # modulo 2^64, so that differences are exact
    return mix(sums[ends] - sums[starts])


def both(english: U64, foreign: U64) -> U64:
    """[n], [n] -> [n]: 64 bits of each pair."""
    return mix(english * np.uint64(3) + mix(foreign))


class Digests:
    """A growing set of 64-bit numbers, 8 bytes each: sorted runs, each at most half the one before.

    Python's own sets need about 70 bytes a number.
    """

    def __init__(self) -> None:
        self._runs: list[U64] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def contains(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """[n]: whether each was added."""
        found = np.zeros(len(numbers), bool)
        for run in self._runs:
            place = np.searchsorted(run, numbers)
            found |= run[np.minimum(place, len(run) - 1)] == numbers
        return found

    def add(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Adds them; [n]: whether each was new, the first of equal ones only."""
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

"""Chunks: some sentence pairs of one split as columns, with values that several stages need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice

import numpy as np

from m4.data.arrays import U32, U64, Ints, Mask
from m4.data.permutation import GOLDEN, mix
from m4.data.sources import Pair
from m4.data.splits import normal
from m4.settings import InputError, shown


def digests(texts: Sequence[str]) -> U64:
    """Returns [n] 64-bit hashes of texts: the sum over characters of mix(character, place).

    Each term is a separate random number (splitmix64), so that the sums of different texts differ
    like random numbers. They are equal on every machine.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    points, ends = code_points("".join(texts)), np.cumsum(lengths)
    starts = ends - lengths
    # Places are counted from the start of the text.
    places = np.arange(1, len(points) + 1, dtype=np.uint64)
    places -= np.repeat(starts.astype(np.uint64), lengths)
    sums = np.zeros(len(points) + 1, np.uint64)
    # Sums are modulo 2^64, so that differences are exact.
    np.cumsum(mix(places * GOLDEN + points), out=sums[1:])
    return mix(sums[ends] - sums[starts])


def code_points(text: str) -> U32:
    """Returns the code points of a text, including halves of surrogate pairs."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def both(first: U64, second: U64) -> U64:
    """Returns [n] 64-bit hashes of pairs, given the hashes of their sides."""
    return mix(first * np.uint64(3) + mix(second))


class Digests:
    """A growing set of 64-bit numbers, 8 bytes each: sorted runs, each at most half the one before.

    Python's sets need about 70 bytes per number.
    """

    def __init__(self, numbers: U64 | None = None) -> None:
        """Starts with no numbers, or with sorted ones."""
        self._runs: list[U64] = [] if numbers is None or not len(numbers) else [numbers]

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def numbers(self) -> U64:
        """Returns all added numbers, sorted."""
        if len(self._runs) > 1:
            self._runs = [np.sort(np.concatenate(self._runs))]
        return self._runs[0] if self._runs else np.zeros(0, np.uint64)

    def contains(self, numbers: U64) -> Mask:
        """Returns [n]: whether each number is in the set."""
        found = np.zeros(len(numbers), bool)
        for run in self._runs:
            place = np.searchsorted(run, numbers)
            found |= run[np.minimum(place, len(run) - 1)] == numbers
        return found

    def add(self, numbers: U64) -> Mask:
        """Adds numbers; returns [n]: whether each was new, or the first of equal new ones."""
        unique, first = np.unique(numbers, return_index=True)
        fresh = ~self.contains(unique)
        new = np.zeros(len(numbers), bool)
        new[first[fresh]] = True
        run = unique[fresh]
        if len(run):
            while self._runs and len(self._runs[-1]) <= 2 * len(run):
                run = np.concatenate([self._runs.pop(), run])
                run.sort(kind="stable")  # merges two sorted runs in linear time
            self._runs.append(run)
        return new


class Numbers:
    """Numbers texts in the order of first occurrence, with 12 bytes each, like `Digests`."""

    def __init__(self) -> None:
        self._runs: list[tuple[U64, U32]] = []
        self.count = 0

    def __call__(self, digests: U64) -> tuple[Ints, Ints]:
        """Returns the [n] numbers of the texts, and the indices of new texts."""
        unique, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
        found = np.full(len(unique), -1)
        for keys, numbers in self._runs:
            place = np.minimum(np.searchsorted(keys, unique), len(keys) - 1)
            found = np.where(keys[place] == unique, numbers[place], found)
        new = np.flatnonzero(found < 0)
        places = np.sort(first[new])
        found[new] = self.count + np.searchsorted(places, first[new])
        self.count += len(new)
        if len(new):
            keys, numbers = unique[new], found[new].astype(np.uint32)
            while self._runs and len(self._runs[-1][0]) <= 2 * len(keys):
                more_keys, more_numbers = self._runs.pop()
                keys = np.concatenate([more_keys, keys])
                order = np.argsort(keys, kind="stable")
                keys, numbers = keys[order], np.concatenate([more_numbers, numbers])[order]
            self._runs.append((keys, numbers))
        return found[inverse], places


# Maximum number of sentences in a language, as files number them with 32 bits.
MOST_SENTENCES = 1 << 32


def check_sentences(language: str, count: int) -> None:
    """Raises InputError if a language has more sentences than a corpus can number."""
    if count > MOST_SENTENCES:
        most = f"more than {MOST_SENTENCES:,} different sentences"
        raise InputError(f"{language}: {most}, which one corpus cannot have; give fewer files")


# Number of pairs that is large enough for numpy and small enough for the processor's cache.
PAIRS = 1024


class Chunk:
    """Immutable columns of n pairs, with their [n] numbers in the source, from 1."""

    def __init__(self, numbers: Ints, first: list[str], second: list[str]) -> None:
        assert len(numbers) == len(first) == len(second)
        self.numbers, self.first, self.second = numbers, first, second
        self._normal: dict[str, U64] = {}

    def __len__(self) -> int:
        return len(self.first)

    def side(self, name: str) -> list[str]:
        """Returns the [n] sentences of a side, "first" or "second"."""
        return self.first if name == "first" else self.second

    def lengths(self, side: str) -> Ints:
        """Returns [n] lengths of a side's sentences in characters."""
        return np.fromiter(map(len, self.side(side)), np.int64, len(self))

    def code_points(self, side: str) -> U32:
        """Returns all characters of a side, sentence after sentence."""
        return code_points("".join(self.side(side)))

    def digests(self, side: str) -> U64:
        """Returns [n] 64-bit hashes of the sentences."""
        return digests(self.side(side))

    def normal_digests(self, side: str) -> U64:
        """Returns [n] 64-bit hashes of the sentences without case, width and spacing (`normal`)."""
        if side not in self._normal:
            self._normal[side] = digests([*map(normal, self.side(side))])
        return self._normal[side]

    def take(self, mask: Mask) -> Chunk:
        """Returns the pairs that a mask [n] selects, in order."""
        if mask.all():
            return self
        wanted = mask.tolist()
        sides = (list(compress(side, wanted)) for side in (self.first, self.second))
        made = Chunk(self.numbers[mask], *sides)
        made._normal = {side: values[mask] for side, values in self._normal.items()}
        return made


def chunks(pairs: Iterable[Pair], size: int = PAIRS) -> Iterator[Chunk]:
    """Yields pairs, numbered from 1, in chunks."""
    iterator, start = iter(pairs), 1
    while part := list(islice(iterator, size)):
        for one in part:
            if not (isinstance(one, tuple) and [*map(type, one)] == [str, str]):
                said = "a source's pairs() must yield Pair(first, second), two texts"
                raise InputError(f"CorpusSpec.source: {said}; it gave {shown(one)}")
        first, second = zip(*part, strict=True)
        numbers = np.arange(start, start + len(part))
        yield Chunk(numbers, list(first), list(second))
        start += len(part)

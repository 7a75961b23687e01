"""Some sentence pairs of one split as columns, with values that several stages need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from m4.data.cleaning.keys import code_points, digests
from m4.data.sources import Pair
from m4.data.splits import normal
from m4.settings import InputError, shown

# Large enough for numpy, small enough for the arrays to stay in the processor's cache.
PAIRS = 1024


class Chunk:
    """Columns of n pairs; never changed in place, because computed values are kept with the text.

    Args:
        numbers: [n] places in the order of the source, from 1.
    """

    def __init__(self, numbers: npt.NDArray[np.int64], first: list[str], second: list[str]) -> None:
        assert len(numbers) == len(first) == len(second)
        self.numbers, self.first, self.second = numbers, first, second
        self._normal: dict[str, npt.NDArray[np.uint64]] = {}

    def __len__(self) -> int:
        return len(self.first)

    def side(self, name: str) -> list[str]:
        """Returns [n] sides, "first" or "second"."""
        return self.first if name == "first" else self.second

    def lengths(self, side: str) -> npt.NDArray[np.int64]:
        """Returns [n] numbers of characters."""
        return np.fromiter(map(len, self.side(side)), np.int64, len(self))

    def code_points(self, side: str) -> npt.NDArray[np.uint32]:
        """Returns all characters of a side, one sentence after another."""
        return code_points("".join(self.side(side)))

    def digests(self, side: str) -> npt.NDArray[np.uint64]:
        """Returns [n] 64 bits of each sentence as it is."""
        return digests(self.side(side))

    def normal_digests(self, side: str) -> npt.NDArray[np.uint64]:
        """Returns [n] 64 bits of each sentence without case, width and spacing (`normal`)."""
        if side not in self._normal:
            self._normal[side] = digests([*map(normal, self.side(side))])
        return self._normal[side]

    def take(self, mask: npt.NDArray[np.bool_]) -> Chunk:
        """Returns the pairs that a mask [n] marks, in their order."""
        if mask.all():
            return self
        wanted = mask.tolist()
        made = Chunk(
            self.numbers[mask],
            list(compress(self.first, wanted)),
            list(compress(self.second, wanted)),
        )
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

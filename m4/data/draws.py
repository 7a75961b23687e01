"""Which pair is drawn k-th: a pure function of (seed, k), with exact shares and strict epochs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from m4.data import permutation

_ONE = 1 << 48
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 20


class Draws:
    """An endless sequence of (direction, example), of which any stretch can be asked for.

    Draws come in blocks. A block holds each direction floor or ceil of its share (or one more
    or less), so that after any number of blocks no count is off by more than 1; a keyed
    permutation orders the block. So the o-th draw of a direction is known by arithmetic, and a
    second keyed permutation, a new one each epoch, says which of its n examples that is:
    example = permute(o mod n) under the key of epoch o div n. Every example is drawn once
    before any is drawn twice.
    Source: shared stateless sampling as in grain's MapDataset.mix; Feistel: permutation.py.
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], rates: Sequence[float], seed: int
    ) -> None:
        assert len(names) == len(sizes) == len(rates) > 0
        for name, size, rate in zip(names, sizes, rates, strict=True):
            if size <= 0 or not rate > 0:
                raise ValueError(f"{name}: {size} examples at rate {rate}: both must be above 0")
        self.names, self.sizes = list(names), np.array(sizes, np.uint64)
        total, upto = float(sum(rates)), 0.0
        # Shares as whole numbers of 2^-48, cumulative: no rounding, however far k goes.
        self.bounds = [0]
        for rate in rates:
            upto += float(rate)
            self.bounds.append(round(upto / total * _ONE))
        self.bounds[-1] = _ONE
        least = min(b - a for a, b in pairwise(self.bounds))
        self.block = _SMALLEST_BLOCK
        while self.block * least < _ONE:
            self.block *= 2
            if self.block > _LARGEST_BLOCK:
                name = self.names[int(np.argmin(rates))]
                raise ValueError(
                    f"{name}: a share of {min(rates) / total:.1e} is too small, at least "
                    f"{1 / _LARGEST_BLOCK:.1e} (leave the direction out or raise "
                    "jobs.Setup.sampler's temperature)"
                )
        self._block_key = permutation.key("block", seed)
        self._keys = np.array([permutation.key("epoch", seed, name) for name in names], np.uint64)
        self._cached = lru_cache(maxsize=4)(self._make_block)

    def draw(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Draws start ... stop - 1: (direction index, example index within the direction)."""
        parts = []
        for number in range(start // self.block, -(-stop // self.block)):
            first = number * self.block
            inside = slice(max(start - first, 0), min(stop - first, self.block))
            parts.append(tuple(array[inside] for array in self._cached(number)))
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        directions, occurrences = (np.concatenate(part) for part in zip(*parts, strict=True))
        sizes = self.sizes[directions]
        epochs = occurrences // sizes
        keys = permutation.mix(self._keys[directions] ^ permutation.mix(epochs))
        examples = permutation.permute(occurrences % sizes, sizes, keys)
        return directions, examples.astype(np.int64)

    def counts(self, stop: int) -> list[int]:
        """How often each direction is drawn in the first `stop` draws."""
        number, rest = divmod(stop, self.block)
        counts = self._before(number)
        if rest:
            inside = np.bincount(self._cached(number)[0][:rest], minlength=len(counts))
            counts = [a + int(b) for a, b in zip(counts, inside, strict=True)]
        return counts

    def _before(self, number: int) -> list[int]:
        """Draws of each direction before block `number`."""
        edges = [number * self.block * bound // _ONE for bound in self.bounds]
        return [b - a for a, b in pairwise(edges)]

    def _make_block(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """(direction, occurrence of that direction since the first draw) of a block's draws."""
        before, after = self._before(number), self._before(number + 1)
        counts = np.array([b - a for a, b in zip(before, after, strict=True)])
        order = permutation.permutation(
            self.block, permutation.key("order", self._block_key, number)
        )
        directions = np.repeat(np.arange(len(counts)), counts)[order]
        # The rank of a draw among those of its direction: a stable sort puts them together.
        together = np.argsort(directions, kind="stable")
        rank = np.empty(self.block, np.uint64)
        starts = np.cumsum(counts) - counts
        sorted_directions = directions[together]
        rank[together] = np.arange(self.block) - starts[sorted_directions]
        return directions, rank + np.array(before, np.uint64)[directions]

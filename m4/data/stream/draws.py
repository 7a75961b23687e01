"""Draws pairs: the k-th is a pure function of (seed, k), with exact shares and strict epochs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from m4.data import permutation
from m4.data.arrays import Ints
from m4.data.samplers import Phase
from m4.data.samplers.temperature import temperature
from m4.data.stream import numba_loops
from m4.settings import InputError

_ONE = 1 << 48
# More pairs than a shuffle buffer holds: 5 MB with 70 ids a pair.
WINDOW = 1 << 15
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 20


class Drawn(NamedTuple):
    """Pairs of K draws."""

    directions: Ints  # [K] numbers of the directions
    examples: Ints  # [K] numbers of the pairs within their directions
    epochs: Ints  # [K] earlier draws of the same pair


class Draws:
    """An endless sequence of pairs of which any stretch can be asked for.

    Draws come in blocks. A block holds each direction floor or ceil of its share (or one more or
    less), so that after any number of blocks no count is off by more than 1; a keyed permutation
    orders the block. So the o-th draw of a direction is known by arithmetic, and a second keyed
    permutation, a new one each epoch, names the example: permute(o mod n) under the key of epoch
    o div n, of n examples. Every example is drawn once before any is drawn twice. A direction with
    more than `window` examples is drawn from one stretch of so many after the other, in another
    order each epoch: reads of a corpus that is larger than memory stay close together.
    Source: shared stateless sampling as in grain's MapDataset.mix; Feistel: permutation.py.

    Args:
        rates: [D] rates; a direction with rate 0 is not drawn.
        names, sizes: [D] names, which decide the order with the seed, and numbers of pairs.
        seed: Decides the order, with `phase`, the number of the phase.
        first: [D] draws of each direction before these, from where its epochs continue. Defaults to
            none.
        window: Examples of a stretch.

    Raises:
        InputError: A rate that is negative, infinite, of no pairs, or too small next to the others.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        rates: Sequence[float],
        seed: int,
        first: Sequence[int] | None = None,
        phase: int = 0,
        window: int = WINDOW,
    ) -> None:
        assert len(names) == len(sizes) == len(rates) > 0
        for name, size, rate in zip(names, sizes, rates, strict=True):
            if not 0 <= rate < math.inf:
                raise InputError(f"{name}: the rate is {rate}: must be 0 or more")
            if rate and size <= 0:
                raise InputError(f"{name}: no training pairs, but a rate of {rate}")
        if not any(rates):
            raise InputError("all rates are 0: nothing to draw")
        self.names, self.phase = list(names), phase
        self.first = [0] * len(names) if first is None else list(first)
        total, upto = float(sum(rates)), 0.0
        # Shares as whole numbers of 2^-48, cumulative: no rounding, however far k goes.
        self.bounds = [0]
        for rate in rates:
            upto += float(rate)
            self.bounds.append(round(upto / total * _ONE))
        # Rates of 0 at the end stay empty, too.
        self.bounds = [_ONE if bound == self.bounds[-1] else bound for bound in self.bounds]
        drawn = [i for i, rate in enumerate(rates) if rate]
        least = min(self.bounds[i + 1] - self.bounds[i] for i in drawn)
        self.block = _SMALLEST_BLOCK
        while self.block * least < _ONE:
            self.block *= 2
            if self.block > _LARGEST_BLOCK:
                rarest = min(drawn, key=lambda i: rates[i])
                share, remedy = rates[rarest] / total, "leave it out or raise the temperature"
                said = f"a share of {share:.1e} is too small, at least {1 / _LARGEST_BLOCK:.1e}"
                raise InputError(f"{self.names[rarest]}: {said} ({remedy})")
        self._sizes, self._window = np.array(sizes, np.uint64), np.uint64(window)
        order = ("block", seed, phase) if phase else ("block", seed)
        self._block_key = permutation.key(*order)
        self._keys = np.array([permutation.key("epoch", seed, name) for name in names], np.uint64)
        self._cached = lru_cache(maxsize=2)(self._make_block)

    def draw(self, start: int, stop: int) -> Drawn:
        """Returns the draws start ... stop - 1."""
        none = np.zeros(0, np.int64)
        parts: list[tuple[Ints, ...]] = [(none, none)]
        for number in range(start // self.block, -(-stop // self.block)):
            first = number * self.block
            inside = slice(max(start - first, 0), min(stop - first, self.block))
            parts.append(tuple(array[inside] for array in self._cached(number)))
        directions, occurrences = (np.concatenate(part) for part in zip(*parts, strict=True))
        found = numba_loops.examples(directions, occurrences, self._sizes, self._keys, self._window)
        return Drawn(directions, *found)

    def counts(self, stop: int) -> list[int]:
        """Returns how often each direction is drawn before draw `stop`, with those of `first`."""
        number, rest = divmod(stop, self.block)
        counts = self._before(number)
        if rest:
            inside = np.bincount(self._cached(number)[0][:rest], minlength=len(counts))
            counts = [a + int(b) for a, b in zip(counts, inside, strict=True)]
        return counts

    def _before(self, number: int) -> list[int]:
        """Returns the draws of each direction before block `number`."""
        edges = [number * self.block * bound // _ONE for bound in self.bounds]
        counts = (stop - start for start, stop in pairwise(edges))
        return [first + count for first, count in zip(self.first, counts, strict=True)]

    def _make_block(self, number: int) -> tuple[Ints, Ints]:
        """Returns the directions of a block's draws, and each one's earlier draws, [block] both."""
        before, after = (np.array(self._before(n)) for n in (number, number + 1))
        key = permutation.key("order", self._block_key, number)
        order = permutation.permutation(self.block, key)
        directions = np.repeat(np.arange(len(before)), after - before)[order]
        return directions, numba_loops.occurrences(directions, before)


class Stretch(NamedTuple):
    """The groups of steps of one phase."""

    first_group: int
    draws: Draws
    pairs: int  # of a group

    def first_draw(self, group: int) -> int:
        """Returns the first draw of a group, counted in the phase."""
        return max(group - self.first_group, 0) * self.pairs


class Phases:
    """Rates that change between groups of steps.

    A phase starts at the first group that begins at or after its first step. Draws and epochs of a
    direction are counted over all phases. How many pairs a group has is found once a phase, when it
    is first needed: pairs_of(draws).

    Attributes:
        entries: All phases, first the `initial_count` ones of the beginning.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        directions: Sequence[str],
        sizes: Sequence[int],
        seed: int,
        group_steps: int,
        window: int,
        pairs_of: Callable[[Draws], int],
    ) -> None:
        """Raises InputError for phases that cannot be."""
        self._directions, self._sizes, self._seed = list(directions), list(sizes), seed
        self._group_steps, self._window, self._pairs_of = group_steps, window, pairs_of
        self.entries: list[Phase] = []
        self._stretches: list[Stretch] = []
        for phase in phases:
            self._append(phase)
        self.initial_count = len(self.entries)
        steps = [phase.first_step for phase in phases]
        if steps[:1] != [0]:
            raise InputError(f"phases begin at steps {steps}: the first one must begin at 0")

    def of(self, group: int) -> Stretch:
        """Returns the stretch of the phase that a group belongs to."""
        last = max(i for i in range(len(self.entries)) if self._first_group(i) <= group)
        for i in range(len(self._stretches), last + 1):
            first_group = self._first_group(i)
            before = None
            if i:
                stretch = self._stretches[i - 1]
                before = stretch.draws.counts(stretch.first_draw(first_group))
            draws = self._draws(self.entries[i], before, i)
            self._stretches.append(Stretch(first_group, draws, self._pairs_of(draws)))
        return self._stretches[last]

    def begin(self, step: int, rates: Mapping[str, float]) -> int:
        """Appends a phase; returns the step at which it starts, `step` or the next possible one."""
        start = -(-step // self._group_steps) * self._group_steps
        entry = Phase(start, dict(rates))
        later = len(self.entries) > self.initial_count
        if later and self.entries[-1].first_step == start:  # it would never have been in force
            self._draws(entry)
            self.entries.pop()
            del self._stretches[len(self.entries) :]
        self._append(entry)
        return start

    def restart(self) -> None:
        """Forgets the phases that began later."""
        del self.entries[self.initial_count :]
        del self._stretches[self.initial_count :]

    def initial(self) -> list[list[Any]]:
        """Returns first step and cumulative shares of each phase that `__init__` got."""
        initial = self.entries[: self.initial_count]
        return [[entry.first_step, self._draws(entry).bounds] for entry in initial]

    def _append(self, entry: Phase) -> None:
        if self.entries and (step := entry.first_step) < (last := self.entries[-1].first_step):
            said = f"a phase begins at step {step}, the one before it at step {last}"
            raise InputError(f"{said}: must not fall")
        self._draws(entry)  # mistakes in the rates are raised at once, not when the phase begins
        self.entries.append(entry)

    def _draws(self, entry: Phase, before: Sequence[int] | None = None, number: int = 0) -> Draws:
        rates = [float(entry.rates.get(direction, 0.0)) for direction in self._directions]
        return Draws(self._directions, self._sizes, rates, self._seed, before, number, self._window)

    def _first_group(self, number: int) -> int:
        return -(-self.entries[number].first_step // self._group_steps)


def listed(phases: Any, sizes: dict[str, int]) -> Sequence[Phase]:
    """Returns the phases of a stream's argument: rates, phases of them, or None: temperature."""
    phases = temperature(sizes) if phases is None else phases
    if isinstance(phases, Mapping):
        phases = [Phase(0, dict(phases))]
    if not phases:
        raise InputError("no phases: nothing to draw")
    return phases

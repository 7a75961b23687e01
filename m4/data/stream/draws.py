"""Draws of pairs: the k-th is a pure function of (seed, k), with exact shares and strict epochs."""

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
# Size of a window, larger than a shuffle buffer: 5 MB with 70 ids per pair.
WINDOW = 1 << 15
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 20


class Drawn(NamedTuple):
    """Results of K draws."""

    directions: Ints  # [K] numbers of the directions
    examples: Ints  # [K] indices of the pairs within their directions
    epochs: Ints  # [K] numbers of earlier draws of the same pair


class Draws:
    """An endless sequence of pairs, of which any range can be computed.

    Draws come in blocks. A block has each direction floor or ceil of its share (or one more or
    less) times, so that after any number of blocks no count is off by more than 1; a keyed
    permutation orders the block. Thus arithmetic gives the o-th draw of a direction, and a second
    keyed permutation, a new one each epoch, gives the example: permute(o mod n) of n examples,
    under the key of epoch o div n. Every example is drawn once before any is drawn twice. A
    direction with more than `window` examples is drawn window by window, in another order each
    epoch, so that reads of a corpus larger than memory stay close together.
    Source: stateless sampling as in grain's MapDataset.mix; Feistel: permutation.py.

    Args:
        rates: [D] rates; directions with rate 0 are not drawn.
        names, sizes: [D] names, which with the seed decide the order, and numbers of pairs.
        seed: Seed of the order, together with `phase`, the number of the phase.
        first: [D] numbers of earlier draws, after which epochs continue. Defaults to 0.
        window: Number of examples in a window.

    Raises:
        InputError: A rate is negative, infinite, too small next to others, or has no pairs.
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], rates: Sequence[float], seed: int,
        first: Sequence[int] | None = None, phase: int = 0, window: int = WINDOW,
    ) -> None:  # fmt: skip
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
        # Cumulative shares as multiples of 2^-48, without rounding for any k.
        self.bounds = [0]
        for rate in rates:
            upto += float(rate)
            self.bounds.append(round(upto / total * _ONE))
        # Directions at the end with rate 0 get no share either.
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
        """Returns draws `start` to `stop` - 1."""
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
        """Returns how often each direction is drawn before draw `stop`, including `first`."""
        number, rest = divmod(stop, self.block)
        counts = self._before(number)
        if rest:
            inside = np.bincount(self._cached(number)[0][:rest], minlength=len(counts))
            counts = [a + int(b) for a, b in zip(counts, inside, strict=True)]
        return counts

    def _before(self, number: int) -> list[int]:
        """Returns the number of draws of each direction before block `number`."""
        edges = [number * self.block * bound // _ONE for bound in self.bounds]
        counts = (stop - start for start, stop in pairwise(edges))
        return [first + count for first, count in zip(self.first, counts, strict=True)]

    def _make_block(self, number: int) -> tuple[Ints, Ints]:
        """Returns for each draw of a block its direction, and that direction's earlier draws."""
        before, after = (np.array(self._before(n)) for n in (number, number + 1))
        key = permutation.key("order", self._block_key, number)
        order = permutation.permutation(self.block, key)
        directions = np.repeat(np.arange(len(before)), after - before)[order]
        return directions, numba_loops.occurrences(directions, before)


class Stretch(NamedTuple):
    """The spans of steps of one phase."""

    first_span: int
    draws: Draws
    pairs: int  # number of pairs in a span

    def first_draw(self, span: int) -> int:
        """Returns the first draw of a span, counted in the phase."""
        return max(span - self.first_span, 0) * self.pairs


class Phases:
    """Rates that change between spans of steps.

    A phase starts at the first span that begins at or after its first step. Draws and epochs of a
    direction are counted over all phases. pairs_of(draws) finds the number of pairs of a span,
    once per phase and when first needed.

    Attributes:
        entries: All phases, beginning with the `initial_count` initial ones.
    """

    def __init__(
        self, phases: Sequence[Phase], directions: Sequence[str], sizes: Sequence[int], seed: int,
        span_steps: int, window: int, pairs_of: Callable[[Draws], int],
    ) -> None:  # fmt: skip
        """Takes the initial phases. Raises InputError for impossible ones."""
        self._directions, self._sizes, self._seed = list(directions), list(sizes), seed
        self._span_steps, self._window, self._pairs_of = span_steps, window, pairs_of
        self.entries: list[Phase] = []
        self._stretches: list[Stretch] = []
        for phase in phases:
            self._append(phase)
        self.initial_count = len(self.entries)
        steps = [phase.first_step for phase in phases]
        if steps[:1] != [0]:
            raise InputError(f"phases begin at steps {steps}: the first one must begin at 0")

    def of(self, span: int) -> Stretch:
        """Returns the stretch to which a span belongs."""
        last = max(i for i in range(len(self.entries)) if self._first_span(i) <= span)
        for i in range(len(self._stretches), last + 1):
            first_span = self._first_span(i)
            before = None
            if i:
                stretch = self._stretches[i - 1]
                before = stretch.draws.counts(stretch.first_draw(first_span))
            draws = self._draws(self.entries[i], before, i)
            self._stretches.append(Stretch(first_span, draws, self._pairs_of(draws)))
        return self._stretches[last]

    def begin(self, step: int, rates: Mapping[str, float]) -> int:
        """Appends a phase; returns its first step, the next possible one from `step` on."""
        start = -(-step // self._span_steps) * self._span_steps
        entry = Phase(start, dict(rates))
        later = len(self.entries) > self.initial_count
        if later and self.entries[-1].first_step == start:  # the one before was never used
            self._draws(entry)
            self.entries.pop()
            del self._stretches[len(self.entries) :]
        self._append(entry)
        return start

    def restart(self) -> None:
        """Removes the appended phases."""
        del self.entries[self.initial_count :]
        del self._stretches[self.initial_count :]

    def initial(self) -> list[list[Any]]:
        """Returns the first step and cumulative shares of each initial phase."""
        initial = self.entries[: self.initial_count]
        return [[entry.first_step, self._draws(entry).bounds] for entry in initial]

    def _append(self, entry: Phase) -> None:
        if self.entries and (step := entry.first_step) < (last := self.entries[-1].first_step):
            said = f"a phase begins at step {step}, the one before it at step {last}"
            raise InputError(f"{said}: must not fall")
        self._draws(entry)  # raises for wrong rates now, not when the phase begins
        self.entries.append(entry)

    def _draws(self, entry: Phase, before: Sequence[int] | None = None, number: int = 0) -> Draws:
        rates = [float(entry.rates.get(direction, 0.0)) for direction in self._directions]
        return Draws(self._directions, self._sizes, rates, self._seed, before, number, self._window)

    def _first_span(self, number: int) -> int:
        return -(-self.entries[number].first_step // self._span_steps)


def listed(phases: Any, sizes: dict[str, int]) -> Sequence[Phase]:
    """Returns the phases of a stream's argument: rates, phases, or None for temperature."""
    phases = temperature(sizes) if phases is None else phases
    if isinstance(phases, Mapping):
        phases = [Phase(0, dict(phases))]
    if not phases:
        raise InputError("no phases: nothing to draw")
    return phases

"""Phases: from which group of steps on which rates hold, and what was drawn before."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from m4.data.samplers import Phase
from m4.data.samplers.temperature import temperature
from m4.data.stream.sampling_order import Draws
from m4.settings import InputError


class Stretch:
    """The groups of steps of one phase: the first one, the phase's draws, pairs of a group."""

    def __init__(self, first_group: int, draws: Draws, pairs_of: Callable[[Draws], int]) -> None:
        self.first_group, self.draws, self._pairs_of = first_group, draws, pairs_of

    @cached_property
    def pairs(self) -> int:
        """Number of pairs in a group of steps."""
        return self._pairs_of(self.draws)

    def first_draw(self, group: int) -> int:
        """Returns the first draw of a group, counted in the phase."""
        return (group - self.first_group) * self.pairs if group > self.first_group else 0


class Phases:
    """Rates that change between groups of steps.

    A phase starts at the first group that begins at or after its first step. Draws and epochs of a
    direction are counted over all phases. How many pairs a group has is found once a phase, when it
    is first needed: pairs_of(draws).

    Attributes:
        entries: All phases, first those of the beginning.
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
        self._initial = len(self.entries)
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
            self._stretches.append(Stretch(first_group, draws, self._pairs_of))
        return self._stretches[last]

    def begin(self, step: int, rates: Mapping[str, float]) -> int:
        """Appends a phase; returns the step at which it starts, `step` or the next possible one."""
        start = -(-step // self._group_steps) * self._group_steps
        entry = Phase(start, dict(rates))
        later = len(self.entries) > self._initial
        if later and self.entries[-1].first_step == start:  # it would never have been in force
            self._draws(entry)
            self.entries.pop()
            del self._stretches[len(self.entries) :]
        self._append(entry)
        return start

    def restart(self) -> None:
        """Forgets the phases that began later."""
        del self.entries[self._initial :]
        del self._stretches[self._initial :]

    def initial(self) -> list[list[Any]]:
        """Returns first step and cumulative shares of each phase that `__init__` got."""
        initial = self.entries[: self._initial]
        return [[entry.first_step, self._draws(entry).bounds] for entry in initial]

    def _append(self, entry: Phase) -> None:
        if self.entries and entry.first_step < self.entries[-1].first_step:
            raise InputError(
                f"a phase begins at step {entry.first_step}, the one before it at step "
                f"{self.entries[-1].first_step}: must not fall"
            )
        self._draws(entry)  # mistakes in the rates are raised at once, not when the phase begins
        self.entries.append(entry)

    def _draws(self, entry: Phase, before: Sequence[int] | None = None, number: int = 0) -> Draws:
        rates = [float(entry.rates.get(direction, 0.0)) for direction in self._directions]
        return Draws(self._directions, self._sizes, rates, self._seed, before, number, self._window)

    def _first_group(self, number: int) -> int:
        return -(-self.entries[number].first_step // self._group_steps)


def listed(phases: Any, sizes: dict[str, int]) -> Sequence[Phase]:
    """Returns the phases of a stream's argument: rates, phases of them, or None: temperature(T=5).

    Raises:
        InputError: There are none.
    """
    phases = temperature(sizes) if phases is None else phases
    if isinstance(phases, Mapping):
        phases = [Phase(0, dict(phases))]
    if not phases:
        raise InputError("no phases: nothing to draw")
    return phases

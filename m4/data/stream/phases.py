"""Phases: from which group of steps on which rates hold, and what was drawn before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from m4.data.samplers import Phase
from m4.data.samplers.temperature import temperature
from m4.data.stream.sampling_order import Draws
from m4.settings import InputError


class Stretch:
    """The groups of steps of one phase: the first one, the phase's draws, pairs of a group."""

    def __init__(
        self,
        first_group: int,
        draws: Draws,
        pairs_of: Callable[[Draws], int],
        pairs: int | None = None,
    ) -> None:
        self.first_group, self.draws = first_group, draws
        self._pairs_of, self._pairs = pairs_of, pairs

    @cached_property
    def pairs(self) -> int:
        """Number of pairs in a group of steps."""
        return self._pairs_of(self.draws) if self._pairs is None else self._pairs

    def first_draw(self, group: int) -> int:
        """Returns the first draw of a group, counted in the phase."""
        return (group - self.first_group) * self.pairs if group > self.first_group else 0


class Phases:
    """Rates that change between groups of steps.

    A phase starts at the first group that begins at or after its first step. Draws and epochs of
    a direction are counted over all phases. How many pairs a group has is found
    once a phase, when it is first needed: pairs_of(draws).
    """

    def __init__(
        self,
        phases: Sequence[Phase | Mapping[str, Any]],
        directions: Sequence[str],
        sizes: Sequence[int],
        seed: int,
        group_steps: int,
        window: int,
        pairs_of: Callable[[Draws], int],
    ) -> None:
        """phases: `Phase`s, or what `as_json` gave. ValueError: where phases cannot be."""
        self._directions, self._sizes, self._seed = list(directions), list(sizes), seed
        self._group_steps, self._window, self._pairs_of = group_steps, window, pairs_of
        self._entries: list[_Entry] = []
        self._stretches: list[Stretch] = []
        for phase in phases:
            self._append(_Entry(*phase) if isinstance(phase, Phase) else _Entry(**dict(phase)))
        if not self._entries or self._entries[0].first_step != 0:
            raise InputError(
                f"phases begin at steps {[e.first_step for e in self._entries]}: the first one "
                "must begin at 0"
            )

    def of(self, group: int) -> Stretch:
        """The phase of a group."""
        last = max(i for i in range(len(self._entries)) if self._first_group(i) <= group)
        for i in range(len(self._stretches), last + 1):
            first_group = self._first_group(i)
            before = None
            if i:
                stretch = self._stretches[i - 1]
                before = stretch.draws.counts(stretch.first_draw(first_group))
            entry = self._entries[i]
            draws = self._draws(entry, before, i)
            self._stretches.append(Stretch(first_group, draws, self._pairs_of, entry.pairs))
        return self._stretches[last]

    def begin(self, step: int, rates: Mapping[str, float]) -> int:
        """Appends a phase; returns the step at which it starts, `step` or the next possible one."""
        start = -(-step // self._group_steps) * self._group_steps
        entry, last = _Entry(start, dict(rates), initial=False), self._entries[-1]
        if last.first_step == start and not last.initial:  # it would never have been in force
            self._draws(entry)
            self._entries.pop()
            del self._stretches[len(self._entries) :]
        self._append(entry)
        return start

    def restart(self) -> None:
        """Forgets those that began later."""
        self._entries = [entry for entry in self._entries if entry.initial]
        del self._stretches[len(self._entries) :]

    def as_json(self) -> list[dict[str, Any]]:
        """Returns all phases as JSON, which `__init__` takes."""
        return [
            # With the numbers that are known, those phases need no trials when a run resumes.
            dataclasses.asdict(entry)
            | ({"pairs": self._stretches[i].pairs} if i + 1 < len(self._stretches) else {})
            for i, entry in enumerate(self._entries)
        ]

    def initial(self) -> list[list[Any]]:
        """Returns first step and cumulative shares of each phase that `__init__` got."""
        initial = (entry for entry in self._entries if entry.initial)
        return [[entry.first_step, self._draws(entry).bounds] for entry in initial]

    def _append(self, entry: _Entry) -> None:
        if self._entries and entry.first_step < self._entries[-1].first_step:
            raise InputError(
                f"a phase begins at step {entry.first_step}, the one before it at step "
                f"{self._entries[-1].first_step}: must not fall"
            )
        self._draws(entry)  # mistakes in the rates are raised at once, not when the phase begins
        self._entries.append(entry)

    def _draws(self, entry: _Entry, before: Sequence[int] | None = None, number: int = 0) -> Draws:
        rates = [float(entry.rates.get(direction, 0.0)) for direction in self._directions]
        return Draws(self._directions, self._sizes, rates, self._seed, before, number, self._window)

    def _first_group(self, number: int) -> int:
        return -(-self._entries[number].first_step // self._group_steps)


@dataclasses.dataclass(frozen=True)
class _Entry:
    first_step: int
    rates: dict[str, float]
    initial: bool = True
    pairs: int | None = None  # of a group, where it is known already


def listed(phases: Any, sizes: dict[str, int]) -> Sequence[Phase | Mapping[str, Any]]:
    """The phases of a stream's argument: rates, phases of them, or None, temperature(T=5)."""
    phases = temperature(sizes) if phases is None else phases
    if isinstance(phases, Mapping):
        phases = [Phase(0, dict(phases))]
    if not phases:
        raise InputError("no phases: nothing to draw")
    return phases

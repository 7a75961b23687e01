"""A schedule: other samplers or languages from given steps on."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from m4.data.samplers import Phase, Sampler, check_sizes, matching
from m4.settings import SettingError, checked


@checked
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Phases of training, each with its own sampler.

    In gin, where a scope gives each phase its own temperature:

        experiment.Data.sampler = @schedule.Schedule()
        schedule.Schedule.phases = (
            (0, @early/temperature.temperature, ('es', 'de', 'ru')),
            (20000, @late/temperature.temperature, None),
        )
        early/temperature.temperature.temperature = 1.0
        late/temperature.temperature.temperature = 5.0

    Source: NLLB Team 2022, "No Language Left Behind" (curriculum learning: low-resource directions
    join late, so that they do not overfit).

    Attributes:
        phases: (first step, sampler, languages) of each phase. Languages are codes ('gl') or
            directions ('en-gl'), or None for all; others are not drawn in the phase. A phase begins
            at the first window of steps at or after its first step (`m4.data.stream`). Its sampler
            does not learn what the run draws, so unimax needs a budget there.

    Raises:
        SettingError: No phase begins at step 0, or the steps do not rise.
    """

    phases: Sequence[tuple[int, Sampler, Sequence[str] | None]]

    def __post_init__(self) -> None:
        name = "Schedule.phases"
        for number, phase in enumerate(self.phases):
            if not (isinstance(phase, (tuple, list)) and len(phase) == 3 and callable(phase[1])):
                raise SettingError(f"{name}[{number}]", phase, "(first step, sampler, languages)")
            languages = phase[2]
            if isinstance(languages, str) or (languages is not None and not len(languages)):
                raise SettingError(f"{name}[{number}]", phase, "with a list of codes, or None")
        steps = [phase[0] for phase in self.phases]
        rise = all(a < b for a, b in pairwise(steps))
        if steps[:1] != [0] or not rise or not all(isinstance(step, int) for step in steps):
            raise SettingError(f"{name}: first steps", steps, "whole numbers from 0, rising")

    def __call__(self, sizes: dict[str, int]) -> dict[str, float]:
        """Returns the rates of the first phase, with 0 for directions that it does not draw."""
        return dict.fromkeys(sizes, 0.0) | self.plan(sizes)[0].rates

    def plan(self, sizes: dict[str, int]) -> list[Phase]:
        """Returns all phases, each with rates for the directions that it draws."""
        check_sizes(sizes)
        made = []
        for number, (first_step, sampler, languages) in enumerate(self.phases):
            drawn = list(sizes)
            if languages is not None:
                drawn = matching(languages, drawn, f"Schedule.phases[{number}]")
            made.append(Phase(first_step, sampler({name: sizes[name] for name in drawn})))
        return made

"""Learned sampling: a sampler learns rates from evaluations, and the stream draws at them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from m4.data.samplers.learned import Learned
from m4.data.stream.stream import Stream
from m4.settings import SettingError


@dataclasses.dataclass
class LearnedSampling:
    """A run's learned rates: the sampler's state, and the resulting phases of the stream.

    Every checkpoint's note has both. The stream is a function of its phases, so that a resumed run
    draws the same pairs. `start` has the first rates in the sampler's unit (pairs or tokens),
    `pair_rates` converts rates to shares of pairs, and `measured` has, by name, the settings that
    decide when and on what it learns.
    """

    sampler: Learned
    start: Mapping[str, float]
    pair_rates: Callable[[Mapping[str, float]], dict[str, float]]
    stream: Stream
    measured: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._state: Any = self.sampler.begin()

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Continues from a note, if any. Raises SettingError if its measurements were others."""
        self.stream.restart()
        self._state = self.sampler.begin()
        if saved is None:
            return
        for name, here in self.measured.items():
            if (there := saved["measured"].get(name)) != here:
                raise SettingError(
                    name,
                    here,
                    f"{there}, with which learned sampling began: its rates depend on it; set it "
                    "back, choose another MODEL_DIR, or start over with --fresh",
                )
        self._state = saved["state"]
        for first_step, rates in saved["phases"]:
            # `Stream.begin` starts a phase after the given step, at the next window of steps.
            begun = self.stream.begin(first_step - 1, rates)
            assert begun == first_step, (begun, first_step)

    def begin(self, step: int, saved: Mapping[str, Any] | None) -> None:
        """Begins a run after `step` steps of another one, with its learned weights, if any."""
        self.resume(None)
        if saved is None or not saved["state"]["log_weights"]:
            return
        self._state = saved["state"]
        rates = self.pair_rates(self.sampler.rates(self._state, self.start))
        self.stream.begin(step - 1, rates)

    def evaluated(self, step: int, measured: Mapping[str, float]) -> dict[str, float]:
        """Learns from numbers measured after `step` steps; rates change as soon as possible.

        Returns the row to log: "weight/<direction>", relative to the start and at most 1, and the
        new "rate/<direction>"; {} if the sampler reads none of the numbers.
        """
        if not any(name.startswith(self.sampler.reads) for name in measured):
            return {}
        self._state = self.sampler.update(self._state, measured)
        rates = self.sampler.rates(self._state, self.start)
        self.stream.begin(step, self.pair_rates(rates))
        weights = self.sampler.weights(self._state, list(self.start))
        return {
            **{f"weight/{name}": float(f"{weight:.6g}") for name, weight in weights.items()},
            **{f"rate/{name}": float(f"{rate:.6g}") for name, rate in rates.items()},
        }

    def note(self) -> dict[str, Any]:
        phases = [[one.first_step, one.rates] for one in self.stream.later_phases()]
        about = {"state": self._state, "phases": phases, "measured": dict(self.measured)}
        return {"sampling": about}

"""The guard of a run: it finds bad steps (`m4.train.bad_steps`), and skips them or ends the run."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from m4.parallel import distributed
from m4.train.bad_steps import BAD, RECENT, WATCHED, BadStep, guarded
from m4.train.training import Training


class StepGuard:
    """Judges the steps of a run after they have ended: all processes see the same numbers.

    With `Training.on_bad_step` = "stop" and no threshold of spikes the compiled step is the one
    without a guard, and only the metrics that it returns are looked at.
    """

    def __init__(self, training: Training, saved: Mapping[str, Any], sharding: Sharding):
        """Continues from the note `saved` of a checkpoint.

        Args:
            training: The settings.
            saved: The checkpoint's note. Empty at the beginning of a run.
            sharding: Replicated over all devices, for the window of recent values.
        """
        self._action, self._rule = training.on_bad_step, training.bad_steps
        self.on = self._action != "stop" or self._rule.spike_threshold is not None
        self._bad: dict[int, dict[str, Any]] = {
            record["step"]: record for record in saved.get("bad_steps", [])
        }
        self._unchecked: list[tuple[int, dict[str, Any]]] = []
        if self.on:
            size = self._rule.window if self._rule.spike_threshold is not None else 0
            recent_NW = np.full((size, len(WATCHED)), np.nan, np.float32)
            if known := saved.get(RECENT, [])[-size:] if size else []:
                recent_NW[-len(known) :] = known
            # Not device_put, which compares processes' values, and NaN is not itself.
            self._recent = jax.make_array_from_callback(
                recent_NW.shape, sharding, lambda part: recent_NW[part]
            )

    def wrap(self, step: Any) -> Any:
        """Returns the step to compile."""
        return guarded(step, self._rule) if self.on else step

    def inputs(self) -> dict[str, jax.Array]:
        """Returns the arrays that the batch of a guarded step has in addition."""
        return {RECENT: self._recent} if self.on else {}

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes the metrics of a step without reading them, and removes the guard's own."""
        judged: dict[str, Any] = {name: metrics[name] for name in WATCHED}
        if self.on:
            self._recent = metrics.pop(RECENT)
            judged |= metrics.pop(BAD)
        self._unchecked.append((step, judged))

    def check(self) -> list[int]:
        """Judges the steps since the last call, and returns those that were skipped.

        Raises:
            BadStep: One of them ends training.
        """
        unchecked, self._unchecked = jax.device_get(self._unchecked), []
        skipped = []
        for step, judged in unchecked:
            if (what := self._problem(judged)) is not None:
                self._act(step, what)
                skipped.append(step)
        return skipped

    def row(self, step: int) -> dict[str, float]:
        """Returns the number of steps skipped up to `step`, for a row of metrics."""
        return {"skipped_steps": sum(one <= step for one in self._bad)} if self.on else {}

    def note(self) -> dict[str, Any]:
        """Returns what the note of a checkpoint keeps for `__init__`."""
        if not self.on and not self._bad:
            return {}
        about: dict[str, Any] = {"bad_steps": [*self._bad.values()]}
        if self.on and len(self._recent):
            recent_NW = np.asarray(jax.device_get(self._recent))
            about[RECENT] = recent_NW[~np.isnan(recent_NW[:, 0])].tolist()
        return about

    def _problem(self, judged: Mapping[str, Any]) -> str | None:
        """Says what is bad of a step. None if it is a good one."""
        for name in WATCHED:
            if not math.isfinite(value := float(judged[name])):
                return f"{name} is {value}"
        if not judged.get("bad", False):
            return None
        z, name = max(
            (float(z), name)
            for z, name in zip(judged["z"], WATCHED, strict=True)
            if name in self._rule.spikes_of
        )
        return (
            f"{name} is {float(judged[name]):.6g}, a spike: {z:.1f} robust standard deviations "
            f"above the median of {self._rule.window} steps"
        )

    def _act(self, step: int, what: str) -> None:
        said = (
            f"step {step}: {what}; no checkpoint has its numbers. m4 data batch --step={step} "
            "prints its pairs. The learning rate may be too high or its warmup too short (where "
            "nothing else is set, rsqrt.peak and rsqrt.warmup_steps)"
        )
        if self._action == "stop":
            raise BadStep(said)
        self._bad[step] = {"step": step, "what": what}
        row = 1
        while step - row in self._bad:
            row += 1
        if row >= self._rule.most_in_a_row:
            raise BadStep(f"{row} bad steps in a row (BadSteps.most_in_a_row): {said}")
        if distributed.is_primary():
            print(f"step {step}: {what}; skipped", flush=True)

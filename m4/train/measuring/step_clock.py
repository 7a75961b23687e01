"""The time of a training run: in steps, waiting for data, and all else."""

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

# The typical step is the median of so many.
_TYPICAL_STEPS = 101


@dataclasses.dataclass(frozen=True)
class Flops:
    """Model FLOPs of a step, and the peak FLOPs a second of all devices."""

    step: float
    peak: float


class StepClock:
    """Measures steps from outside of the devices.

    A step lasts from the end of the one before, or of a pause, until the loop has seen its own end;
    waiting for its batch and writing a row of metrics are part of it. Pauses are no step's:
    compiling (with the step that is compiled for and its batch), evaluating and saving.

    Attributes:
        step: the one that was dispatched last. phase: "step", "data" (waiting for a batch), or a
            pause's name. since: when the running step or pause began, `time.monotonic`.
    """

    def __init__(
        self, flops: Flops | None, started: float, saved: Mapping[str, Any], devices: int = 1
    ):
        """Continues from the note `saved` of a checkpoint.

        Args:
            started: Time of the run's first start, `time.time`.
            devices: Number of devices, on CPUs of cores.
        """
        self.step, self.phase, self.since = 0, "step", time.monotonic()
        self._flops, self._started, self._devices = flops, started, devices
        self._waited = 0.0
        self._in_steps = float(saved.get("seconds_in_steps", 0.0))
        self._recent: collections.deque[float] = collections.deque(maxlen=_TYPICAL_STEPS)
        self._longest: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._steps: list[float] = []
        self._waits: list[float] = []

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Within it the loop waits for this step's batch."""
        self.step, self.phase, begin = step, "data", time.monotonic()
        yield
        self._waited = time.monotonic() - begin
        self.phase = "step"

    def dispatched(self) -> None:
        """The step of that batch runs, or waits on the device, and its time counts."""
        self._waits.append(self._waited)

    @contextlib.contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Within it no step runs; the next one begins at its end."""
        begin = self.since = time.monotonic()  # before the phase: the watchdog reads both
        self.phase = phase
        yield
        self.since = time.monotonic()
        self._longest[phase] = max(self._longest.get(phase, 0.0), self.since - begin)
        self.phase = "step"

    def ended(self) -> None:
        """A step has ended."""
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        self._steps.append(seconds)
        self._recent.append(seconds)
        self._in_steps += seconds

    @property
    def typical_seconds(self) -> float:
        """The median of the last steps; 0: there was none."""
        recent = self._recent.copy()
        return statistics.median(recent) if recent else 0.0

    def longest_seconds(self, phase: str) -> float | None:
        """Returns the longest finished pause of this phase. None: there was none."""
        return self._longest.get(phase)

    def row(self, step: int) -> dict[str, float]:
        """Returns metrics of the steps since the last row, up to `step` (docs/performance.md)."""
        wall = max(time.time() - self._started, self._in_steps, 1e-9)
        row = {"goodput": self._in_steps / wall, "device_seconds": self._in_steps * self._devices}
        if self._flops is not None:
            row["model_flops"] = self._flops.step * step
        if self._waits:
            row["data_wait_seconds"] = statistics.fmean(self._waits)
        if self._steps:
            row["step_seconds"] = statistics.fmean(self._steps)
            row["step_seconds_deviation"] = statistics.pstdev(self._steps)
            if self._flops is not None:
                computed = self._flops.step * len(self._steps)
                row["mfu"] = computed / max(sum(self._steps), 1e-9) / self._flops.peak
        self._clear()
        return row

    def note(self) -> dict[str, Any]:
        return {"seconds_in_steps": self._in_steps}

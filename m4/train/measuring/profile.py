"""A trace of some steps by JAX's profiler (XProf): what every operation took on the devices."""

from collections.abc import Sequence
from pathlib import Path

import jax

from m4.parallel import distributed

STEP_NAME = "training_step"


class StepProfile:
    """Traces the steps `first` to `last` of the primary process into folder/profile.

    Steps are alike, and so are processes: one trace is enough, and small. As a context manager it
    ends a trace that is under way.
    """

    def __init__(self, steps: Sequence[int] | None, folder: Path, start: int, end: int):
        """start, end: the run takes the steps after `start` up to `end`."""
        self._steps, self._folder = range(0), folder / "profile"
        self._tracing = False
        if steps is None:
            return
        first, last = steps
        self._steps = range(max(first, start + 1), min(last, end) + 1)
        if not self._steps:
            self._say(
                f"none of steps {first} to {last}: this run takes steps {start + 1} to {end} "
                "(Training.profile)"
            )

    def begins(self, step: int) -> bool:
        """Returns True if the trace is to `start` before this step."""
        return step == next(iter(self._steps), None)

    def ends(self, step: int) -> bool:
        """Returns True if the trace is to `stop` after this step, once it has ended."""
        return bool(self._steps) and step == self._steps[-1]

    def start(self) -> None:
        if distributed.is_primary():
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            self._say(f"steps {self._steps[0]} to {self._steps[-1]} in {self._folder}")

    def _say(self, text: str) -> None:
        if distributed.is_primary():
            print(f"profile: {text}")

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._tracing:  # a run that ended early: what there is
            self._tracing = False
            jax.profiler.stop_trace()

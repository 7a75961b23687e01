"""A training run between its hooks: the state, and the steps that were dispatched and run."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m4.parallel import distributed
from m4.train.bad_steps import StepGuard
from m4.train.measuring.counters import Counters
from m4.train.measuring.step_clock import StepClock
from m4.train.preemption import STOP, stop_flags, with_stop_flags
from m4.train.program import TrainProgram
from m4.train.state import TrainState

STEP_NAME = "training_step"


def most_in_flight(mesh: Mesh) -> int:
    """Returns how many steps may have been dispatched and not have ended.

    On accelerators three: one runs, the next one waits on the device, and the loop prepares the one
    after that. On CPUs one: with more, steps with collectives deadlock in XLA's thread pool.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else 3


class StepsInFlight:
    """The steps that were dispatched and have not been seen to end.

    Attributes:
        stop: Whether a step that has ended had a flag of a process that is to stop
            (`m4.train.preemption`). All processes wait for the same steps at the same points of
            their loops, so they agree.
    """

    def __init__(self, most: int, clock: StepClock):
        self.most, self.stop = most, False
        self._clock = clock
        self._steps: collections.deque[tuple[bool, Any, Any]] = collections.deque()

    def add(self, counts: bool, result: jax.Array, stop: jax.Array | None) -> None:
        """Takes a step; waits until one more may be dispatched.

        Args:
            counts: Its time counts: nothing was compiled in it.
            result: An array that is ready when the step has ended.
            stop: Sum of the processes' flags, where there are several.
        """
        if stop is not None:
            stop.copy_to_host_async()
        self._steps.append((counts, result, stop))
        self.wait(self.most - 1)

    def wait(self, left: int = 0) -> None:
        """Returns once at most `left` steps are in flight."""
        while len(self._steps) > left:
            counts, result, stop = self._steps.popleft()
            jax.block_until_ready(result)
            if counts:
                self._clock.ended()
            self.stop = self.stop or (stop is not None and int(stop) > 0)


@dataclasses.dataclass
class Run:
    """A run as its hooks see it.

    Attributes:
        state: State after the last step that was dispatched.
        end: The last step.
        received: Signals that this process was sent (`m4.train.preemption`).
        measured: Numbers that evaluators found at the present step.
        step: Steps dispatched, those before this process included.
        last: Nothing follows the present step: it is `end`, or early stopping has stopped.
        stepped: This process has dispatched a step; else there is nothing to save yet.
        together: The job has several processes.
    """

    program: TrainProgram
    state: TrainState
    end: int
    in_flight: StepsInFlight
    clock: StepClock
    guard: StepGuard
    counters: Counters
    received: Sequence[int] = ()
    measured: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step = int(self.state.step)
        self.last, self.stepped = self.step == self.end, False
        self.together = distributed.is_distributed()
        guarded = self.guard.wrap(self.program.step)
        jitted = self.program.jit(with_stop_flags(guarded) if self.together else guarded)
        self._call = distributed.SynchronizedProgram(jitted, "the step's program")

    @property
    def stopping(self) -> bool:
        """True if a signal ends training after this step; all processes agree on it."""
        return self.in_flight.stop if self.together else bool(self.received)

    def take(self, batch: dict[str, jax.Array]) -> None:
        """Dispatches a step. While it runs, or those before it, the next batch is sent."""
        self.step += 1
        self.last, self.measured = self.step == self.end, {}
        batch |= self.guard.inputs()
        if self.together:
            batch[STOP] = stop_flags(self.program.mesh, bool(self.received))

        def dispatch() -> dict[str, Any]:
            with jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=self.step):
                self.state, metrics = self._call(self.state, batch)
            return metrics

        compile_first = not self.stepped
        if compile_first:
            metrics = self.pause("compile", lambda: jax.block_until_ready(dispatch()))
        else:
            metrics = dispatch()
            self.clock.dispatched()
        self.in_flight.add(not compile_first, metrics["loss"], metrics.pop(STOP, None))
        self.guard.add(self.step, metrics)
        self.counters.add(self.step, metrics)
        self.stepped = True

    def catch_up(self) -> None:
        """Waits for all steps. BadStep: one of them ends training."""
        self.in_flight.wait()
        for step in self.guard.check():
            self.counters.leave_out(step)

    def pause(self, phase: str, work: Callable[[], Any]) -> Any:
        """Waits for all steps, then runs `work`, whose time is no step's."""
        self.catch_up()
        with self.clock.pause(phase):
            return work()


class StepProfile:
    """A trace by JAX's profiler (XProf) of steps of the primary process, in folder/profile.

    Steps are alike, and so are processes: one trace is enough, and small. As a context manager it
    ends a trace that is under way.
    """

    def __init__(self, steps: Sequence[int] | None, folder: Path, start: int, end: int):
        """start, end: the run takes the steps after `start` up to `end`."""
        first, last = steps or (1, 0)
        self._steps = range(max(first, start + 1), min(last, end) + 1)
        self._folder, self._tracing = folder / "profile", False
        if steps and not self._steps and distributed.is_primary():
            print(
                f"profile: none of steps {first} to {last}: this run takes steps {start + 1} to "
                f"{end} (Training.profile)"
            )

    def before(self, run: Run) -> None:
        """Begins the trace before its first step."""
        if self._steps and run.step + 1 == self._steps[0]:
            run.pause("profile", self._start)

    def after(self, run: Run) -> None:
        """Ends the trace after its last step."""
        if self._steps and run.step == self._steps[-1]:
            run.pause("profile", self._stop)

    def _start(self) -> None:
        self._tracing = distributed.is_primary()
        if self._tracing:
            jax.profiler.start_trace(self._folder)

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            print(f"profile: steps {self._steps[0]} to {self._steps[-1]} in {self._folder}")

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._tracing:  # a run that ended early: what there is
            jax.profiler.stop_trace()

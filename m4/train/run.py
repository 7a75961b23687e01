"""A training run between its hooks: state, steps in flight, and signals that end it."""

import collections
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.parallel import distributed
from m4.parallel.platform import signals
from m4.train.bad_steps import StepGuard
from m4.train.measuring.counters import Counters
from m4.train.measuring.step_clock import StepClock
from m4.train.program import TrainProgram
from m4.train.step import TrainState

# Ctrl-C, SIGTERM and SIGHUP end training after the current step, the same one in all processes.
# Processes that stopped at different steps would wait for each other forever. So each passes its
# flag into the step, which sums them; the sum is sent with the step's other communication.
# Name of the flags in a batch, and of their sum in the metrics.
STOP = "stop"


@contextlib.contextmanager
def stop_signals(to_save: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """Collects Ctrl-C, SIGTERM (the notice of preemption) and SIGHUP until the step is done.

    An exception in the middle of a step would leave no state to save. A second Ctrl-C interrupts at
    once. With nothing `to_save`, signals have their usual effect.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        if to_save() and not (received and number == signal.SIGINT):
            received.append(number)
            signals.notice(number)
            return
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        raise KeyboardInterrupt

    before: dict[int, Any] = {n: signal.signal(n, note) for n in signals.not_ignored()}
    try:
        with signals.held(to_save):
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_stop_flags(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the step with `stop_flags` in its batch under STOP, and their sum in its metrics."""

    def run(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
        rest = dict(batch)
        flags = rest.pop(STOP)
        state, metrics = step(state, rest)
        return state, {**metrics, STOP: jnp.sum(flags)}

    return run


def stop_flags(mesh: Mesh, stop: bool) -> jax.Array:
    """Makes int32 [devices], sharded, with 1 on the devices of a process that is to stop."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    here = np.array([stop], np.int32)
    return jax.make_array_from_callback((mesh.size,), sharding, lambda _: here)


STEP_NAME = "training_step"


# Maximum number of dispatched steps that have not ended. Three on accelerators: one runs, the next
# waits on the device, and the loop prepares the one after that. One on CPUs, where more steps with
# collectives deadlock in XLA's thread pool.
MOST_IN_FLIGHT = {"cpu": 1}


@dataclasses.dataclass
class StepsInFlight:
    """Steps that were dispatched and have not been seen to end.

    `stop` is True if an ended step had the flag of a process that is to stop. All processes wait
    for the same steps at the same points of their loops, so they agree.
    """

    most: int
    clock: StepClock
    stop: bool = False

    def __post_init__(self) -> None:
        self._steps: collections.deque[tuple[bool, Any, Any]] = collections.deque()

    def add(self, counts: bool, result: jax.Array, stop: jax.Array | None) -> None:
        """Adds a step; waits until another one may be dispatched.

        A step ends when `result` is ready; its time `counts` if nothing was compiled in it. `stop`
        is the sum of the flags of several processes.
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
                self.clock.ended()
            self.stop = self.stop or (stop is not None and int(stop) > 0)


@dataclasses.dataclass
class Run:
    """A training run, as its hooks see it.

    Attributes:
        state: State after the last dispatched step.
        end: Last step.
        received: Signals that this process received.
        measured: Results of evaluators at the present step.
        step: Number of dispatched steps, including those before this process.
        last: Whether the present step is the last: it is `end`, or early stopping has stopped.
        stepped: Whether this process has dispatched a step; otherwise there is nothing to save.
        together: Whether the job has several processes.
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
        self._call = distributed.synchronized(jitted, "the step's program")

    @property
    def stopping(self) -> bool:
        """True if a signal ends training after this step; all processes agree on it."""
        return self.in_flight.stop if self.together else bool(self.received)

    def take(self, batch: dict[str, jax.Array]) -> None:
        """Dispatches a step. The next batch is sent while steps run."""
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
        """Waits for all steps. Raises BadStep if one of them ends training."""
        self.in_flight.wait()
        for step in self.guard.check():
            self.counters.leave_out(step)

    def pause(self, phase: str, work: Callable[[], Any]) -> Any:
        """Waits for all steps, then runs `work`, whose time counts for no step."""
        self.catch_up()
        with self.clock.pause(phase):
            return work()


class StepProfile(contextlib.ExitStack):
    """A trace of the primary process's steps by JAX's profiler (XProf), in `folder`.

    As a context manager, it ends a running trace. The run takes steps `start` + 1 to `end`.
    """

    def __init__(self, steps: Sequence[int] | None, folder: Path, start: int, end: int):
        super().__init__()
        first, last = steps or (1, 0)
        self._folder, self._steps = folder, range(max(first, start + 1), min(last, end) + 1)
        if steps and not self._steps and distributed.is_primary():
            print(
                f"profile: none of steps {first} to {last}: this run takes steps {start + 1} "
                f"to {end} (Training.profile)"
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
        if distributed.is_primary():
            self.enter_context(jax.profiler.trace(self._folder))

    def _stop(self) -> None:
        self.close()
        if distributed.is_primary():
            print(f"profile: steps {self._steps[0]} to {self._steps[-1]} in {self._folder}")

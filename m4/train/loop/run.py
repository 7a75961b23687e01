"""The training loop: steps in flight, rows of metrics, evaluations, checkpoints, interruptions."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from m4.parallel import distributed
from m4.progress import ProgressBar
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import Metrics
from m4.train import average
from m4.train.early_stopping import EarlyStopper
from m4.train.loop.batches import BatchShape, BatchStream, device_batches, shape_of
from m4.train.loop.guard import StepGuard
from m4.train.loop.preemption import STOP, stop_flags, stop_signals, with_stop_flags
from m4.train.loop.program import TrainProgram
from m4.train.loop.resume import check_same, restore
from m4.train.measuring import watchdog
from m4.train.measuring.counters import Counters
from m4.train.measuring.profile import STEP_NAME, StepProfile
from m4.train.measuring.step_clock import Flops, StepClock
from m4.train.sampling import LearnedSampling
from m4.train.state import TrainState
from m4.train.training import Training


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """What is measured every `period` steps and at the end: run(params) -> {name: number}."""

    period: int
    run: Callable[[Any], dict[str, float]]


# Makes the state before the first step over the program's mesh, and what of another run's note the
# run continues with.
Begin = Callable[[TrainProgram], tuple[TrainState, Mapping[str, Any]]]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP during training; `step` is saved."""

    def __init__(self, step: int):
        super().__init__(f"interrupted at step {step} (saved); run the same command to resume")
        self.step = step

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int]]:  # from a worker to its parent
        return Interrupted, (self.step,)


def most_in_flight(mesh: Mesh) -> int:
    """How many steps may have been dispatched and not have ended.

    On accelerators three: one runs, the next one waits on the device, so that it never waits for
    the host, and the loop prepares the one after that. On CPUs one: on few cores, more than two
    steps with collectives in flight deadlock in XLA's thread pool.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else 3


class StepsInFlight:
    """The steps that were dispatched and have not been seen to end.

    Attributes:
        stop: whether a step that has ended had a flag of a process that is to stop
            (`m4.train.loop.preemption`). All processes wait for the same steps at the same points
            of their loops, so they agree.
    """

    def __init__(self, most: int, clock: StepClock):
        self.most, self.stop = most, False
        self._clock = clock
        self._steps: collections.deque[tuple[BatchShape | None, Any, Any]] = collections.deque()

    def add(self, shape: BatchShape | None, result: jax.Array, stop: jax.Array | None) -> None:
        """A step, with its batch's shape if its time counts; waits until one more may be
        dispatched."""
        if stop is not None:
            stop.copy_to_host_async()
        self._steps.append((shape, result, stop))
        self.wait(self.most - 1)

    def wait(self, left: int = 0) -> None:
        """Returns once at most `left` steps are in flight."""
        while len(self._steps) > left:
            shape, result, stop = self._steps.popleft()
            jax.block_until_ready(result)
            if shape is not None:
                self._clock.ended(shape)
            self.stop = self.stop or (stop is not None and int(stop) > 0)


class TrainingRun:
    """The run of one trainer in a folder: the state, and what its checkpoints keep alongside.

    Attributes:
        state: after the last step that was dispatched. stopper: of early stopping.
    """

    def __init__(
        self,
        training: Training,
        program: TrainProgram,
        folder: Path,
        checkpoints: Checkpoints,
        stream: BatchStream,
        about: Mapping[str, Any],
        groups: Mapping[str, Sequence[str]],
        sampling: LearnedSampling | None,
        flops: Flops | None,
        begin: Begin | None,
    ):
        """Takes up the latest checkpoint; without one `begin` makes the state, of random numbers
        where it is None. about: for checkpoints' notes."""
        self._training, self._program, self._stream = training, program, stream
        self._folder, self._checkpoints = folder, checkpoints
        self._about, self._sampling = about, sampling
        self._first_start = watchdog.first_start(folder)
        latest = distributed.on_primary_then_broadcast(
            "latest checkpoint", lambda: checkpoints.latest
        )
        saved = self._saved = {} if latest is None else checkpoints.note(latest)
        if latest is not None:
            check_same(f"{checkpoints.folder}/{latest}", saved, about)
        self._begun = latest is None and begin is not None
        continued: Mapping[str, Any] = {}
        if latest is None and begin is not None:
            self.state, continued = begin(program)
        else:
            self.state = program.new_state()
        self.stopper = EarlyStopper(training.early_stopping)
        if latest is not None:
            self.state = restore(checkpoints, latest, saved, self.state, self.stopper, about)
        self._start = int(self.state.step)
        if sampling is not None and latest is None:
            sampling.begin(self._start, continued.get("sampling"))
        elif sampling is not None:
            sampling.resume(saved.get("sampling"))
        tokens = max(rows * max(lengths) for rows, *lengths in stream.shapes)
        self._counters = Counters(stream.directions, groups, saved, self._start, tokens)
        self._guard = StepGuard(training, saved, self.state.step.sharding)
        self._clock = StepClock(flops, self._first_start, saved)
        self._in_flight = StepsInFlight(most_in_flight(program.mesh), self._clock)
        self._together = distributed.is_distributed()
        self._compiled: set[BatchShape] = set()
        self._measured: dict[str, float] = {}  # at the present step
        self._stepped = False  # else there is nothing to save yet

    def train(
        self, evaluators: Sequence[Evaluator], progress: ProgressBar | None
    ) -> dict[str, Any]:
        """Trains and saves; returns the last checkpoint's note."""
        with (
            watchdog.watched(self._clock, self._folder, self._first_start),
            stop_signals(lambda: self._together or self._stepped) as received,
        ):
            self._steps(evaluators, progress, received)
            written = self._save(finished=True)
            self._pause("save", self._checkpoints.wait)
            if self._in_flight.stop if self._together else received:
                raise Interrupted(int(self.state.step))
        return written

    def _steps(
        self,
        evaluators: Sequence[Evaluator],
        progress: ProgressBar | None,
        received: Sequence[int],
    ) -> None:
        """Steps until total_steps, early stopping or a signal; checkpoints but for the last one."""
        training, program, start = self._training, self._program, self._start
        together = self._together
        guarded = self._guard.wrap(program.step)
        jitted = program.jit(with_stop_flags(guarded) if together else guarded)
        compiled = distributed.SynchronizedProgram(jitted, "the step's program")
        folder = self._folder if distributed.is_primary() else None
        rows_to = -1 if self._begun else start  # a run that begins has its first row again
        with (
            program.axis_rules(),
            Metrics(
                folder, resume_step=rows_to, saved=self._saved, tensorboard=training.tensorboard
            ) as metrics,
            contextlib.closing(device_batches(program.mesh, self._stream, start)) as batches,
            StepProfile(training.profile, self._folder, start, training.total_steps) as profile,
        ):
            self._metrics = metrics
            if self._begun:
                self._evaluate_first(evaluators, metrics)
            for step in range(start + 1, training.total_steps + 1):
                if self.stopper.stopped:
                    break
                if profile.begins(step):
                    self._pause("profile", profile.start)
                self._step(step, compiled, batches, received)
                if profile.ends(step):
                    self._pause("profile", profile.stop)
                last = step == training.total_steps
                if self._in_flight.most == 1:
                    self._catch_up()
                if step % training.log_period == 0 or last:
                    self._catch_up()
                    row = {**self._counters.row(), **self._clock.row(), **self._guard.row(step)}
                    metrics.write(step, row)
                if progress is not None:
                    progress.update(step, self._counters.text)
                self._evaluate(evaluators, step, last, metrics)
                # The last one, of early stopping too, says that training has finished.
                last = last or self.stopper.stopped
                if (self._in_flight.stop if together else received) and not last:
                    self._save()
                    self._pause("save", self._checkpoints.wait)
                    raise Interrupted(step)
                if step % training.checkpoint_period == 0 and not last:
                    self._save()

    def _step(
        self,
        step: int,
        compiled: Callable[..., Any],
        batches: Generator[dict[str, jax.Array], None, None],
        received: Sequence[int],
    ) -> None:
        """Dispatches a step. While it runs, or those before it, the next batch is sent."""
        with self._clock.waiting(step):
            batch = next(batches)
        shape = shape_of(batch)
        batch |= self._guard.inputs()
        if self._together:
            batch[STOP] = stop_flags(self._program.mesh, bool(received))

        def dispatch() -> dict[str, Any]:
            with jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=step):
                self.state, metrics = compiled(self.state, batch)
            return metrics

        compile_first = shape not in self._compiled
        if compile_first:
            self._compiled.add(shape)
            metrics = self._pause("compile", lambda: jax.block_until_ready(dispatch()))
        else:
            metrics = dispatch()
            self._clock.dispatched()
        counted = None if compile_first else shape
        self._in_flight.add(counted, metrics["loss"], metrics.pop(STOP, None))
        self._guard.add(step, metrics)
        self._counters.add(step, metrics)
        self._stepped = True

    def _catch_up(self) -> None:
        """Waits for all steps. BadStep: one of them ends training."""
        self._in_flight.wait()
        for step in self._guard.check():
            self._counters.leave_out(step)

    def _pause(self, phase: str, work: Callable[[], Any]) -> Any:
        """Does what is no part of a step, after all steps so far."""
        self._catch_up()
        with self._clock.pause(phase):
            return work()

    def _evaluate(
        self, evaluators: Sequence[Evaluator], step: int, last: bool, metrics: Metrics
    ) -> None:
        """Runs the evaluators whose period divides the step, at the last step all.

        A learned sampler takes only what was measured at its period: a run that is made longer
        afterwards learns from the same steps.
        """
        measured: dict[str, float] = {}
        self._measured = {}
        for evaluator in evaluators:
            due = step % evaluator.period == 0
            if due or last:
                params = average.used(self.state)
                values = self._pause("evaluate", functools.partial(evaluator.run, params))
                metrics.write(step, values)
                self.stopper.evaluated(step, values, params)
                measured |= values if due else {}
                self._measured |= values
        if self._sampling is None or not measured:
            return
        if learned := self._sampling.evaluated(step, measured):
            metrics.write(step, learned)

    def _evaluate_first(self, evaluators: Sequence[Evaluator], metrics: Metrics) -> None:
        """Before the first step: what the other model's parameters are worth here."""
        for evaluator in evaluators:
            values = self._pause(
                "evaluate", functools.partial(evaluator.run, average.used(self.state))
            )
            metrics.write(self._start, values)
            if distributed.is_primary():
                shown = [f"{name} {values[name]:.4f}" for name in values if name.count("/") < 2]
                print(f"before the first step: {', '.join(shown)}")

    def _save(self, **more: Any) -> dict[str, Any]:
        """Starts to save the state; returns the checkpoint's note, with `more`."""
        return self._pause("save", lambda: self._start_save(more))

    def _start_save(self, more: Mapping[str, Any]) -> dict[str, Any]:
        learned = {} if self._sampling is None else self._sampling.note()
        step = int(self.state.step)
        counted = {**self._counters.note(), **self._clock.note(), **self._guard.note()}
        counted |= self._metrics.note()
        note = {**self._about, **more, **counted, **learned, **self.stopper.note(), "step": step}
        items = average.items(self.state)
        if self.stopper.best is not None:
            items["best"] = self.stopper.best
        self._checkpoints.save(step, items, note, self._measured)
        if distributed.is_primary():
            self._counters.write(self._folder, note)
        return note

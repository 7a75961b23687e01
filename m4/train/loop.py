"""The training loop: for each step a batch, the step, then hooks in a fixed order.

The hooks guard, log, evaluate, save and stop. `train` connects them and reads from top to bottom.
Each part's `note()` returns what it keeps over an interruption; it is in every checkpoint's note.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from m4.parallel import distributed
from m4.parallel.mesh import host_batch, host_shards, to_global
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import undamaged
from m4.storage.metrics_log import Metrics
from m4.train import average
from m4.train.bad_steps import StepGuard
from m4.train.early_stopping import EarlyStopper
from m4.train.measuring import watchdog
from m4.train.measuring.counters import Counters
from m4.train.measuring.step_clock import Flops, StepClock
from m4.train.program import BatchShape, TrainProgram
from m4.train.run import MOST_IN_FLIGHT, Run, StepProfile, StepsInFlight, stop_signals
from m4.train.sampling import LearnedSampling
from m4.train.step import TrainState
from m4.train.training import Training


class BatchStream(Protocol):
    """A stream whose batch(step) is a pure function: resuming needs only the step."""

    directions: list[str]

    @property
    def shape(self) -> BatchShape:
        """Shape of the batches."""
        ...

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> Mapping[str, np.ndarray]: ...
    def fingerprint(self) -> str: ...


# Makes the initial state over the program's mesh, and the entries of another run's note to
# continue.
Begin = Callable[[TrainProgram], tuple[TrainState, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A measurement, run(params) -> {name: number}, every `period` steps and at the end."""

    period: int
    run: Callable[[Any], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training."""

    # Parameters to use: the best with early stopping, or their average if the optimizer makes one.
    params: Any
    note: dict[str, Any]  # note of the last checkpoint


class Interrupted(KeyboardInterrupt):
    """Training ended by Ctrl-C, SIGTERM or SIGHUP; `step` is saved."""

    def __init__(self, step: int):
        super().__init__(f"interrupted at step {step} (saved); run the same command to resume")
        self.step = step

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int]]:  # a worker sends it
        return Interrupted, (self.step,)


class Hook(Protocol):
    """Work after every step."""

    def after(self, run: Run) -> None: ...


def train(
    program: TrainProgram, training: Training, folder: Path, stream: BatchStream, *,
    evaluators: Sequence[Evaluator] = (), sampling: LearnedSampling | None = None,
    groups: Mapping[str, Sequence[str]] | None = None, note: Mapping[str, Any] | None = None,
    flops: Flops | None = None, begin: Begin | None = None,
    progress: Callable[[int, str], None] | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Trained:  # fmt: skip
    """Trains up to `total_steps`, from the latest checkpoint in `folder` or from the beginning.

    It writes folder/checkpoints/<step> every `checkpoint_period` steps and at the end, with
    atlas.train.json if the model counts directions; rows of folder/metrics.jsonl (and
    folder/tensorboard) every `log_period` steps and at each evaluation; and the files of
    `m4.train.measuring.watchdog`. A run that was killed and restarted takes the same steps as an
    uninterrupted one: batches, dropout and routing are functions of (seed, step). Each of several
    processes gives its host batch and saves its local shards; the primary one writes the rest.

    Args:
        evaluators: Evaluators, run in this order at their periods and at the end.
        sampling: Sampler that learns from the evaluations. Defaults to fixed rates.
        groups: Resource level -> directions, for the displayed loss.
        note: JSON for every checkpoint (fingerprints of data, vocabulary and config).
        flops: FLOPs of a step and FLOP/s of the devices, for utilisation (MFU).
        begin: Function that makes the initial state. Defaults to random parameters.
        progress: Function called with each step and a text about the last row of metrics.
        log: Function called with each row of metrics, in the primary process.

    Raises:
        InputError: The latest checkpoint has another stream or vocabulary, or is a mean of several.
        BadStep: A bad step ended training (`m4.train.bad_steps`).
        Interrupted: Ctrl-C, SIGTERM or SIGHUP came in any process; the step is saved.
    """
    about = {**(note or {}), "stream": stream.fingerprint(), "directions": stream.directions}
    about |= program.about
    if distributed.is_primary() and (stages := about.get("pipeline")):
        print(
            f"pipeline: {stages['stages']} stages, {stages['microbatches']} microbatches; "
            f"each stack's stages are idle for {stages['bubble']:.1%} of its ticks"
        )
    stopper = EarlyStopper(training.early_stopping)
    keep = training.keep_checkpoints, training.keep_period, training.keep_best
    with Checkpoints(folder / "checkpoints", *keep) as checkpoints:
        save = Save(training.checkpoint_period, folder, checkpoints, about, stopper)
        latest, saved = save.latest, save.saved
        begun, continued = latest is None and begin is not None, dict[str, Any]()
        if latest is not None:
            state = save.restored(program)
        elif begin is not None:
            state, continued = begin(program)
        else:
            state = program.new_state()
        start, end = int(state.step), training.total_steps
        first_start = watchdog.first_start(folder)
        rows, *lengths = stream.shape
        if sampling is not None and begun:
            sampling.begin(start, continued.get("sampling"))
        with undamaged(f"{save.place}/note"):
            if sampling is not None and not begun:
                sampling.resume(saved.get("sampling"))
            platform = program.mesh.devices.flat[0].platform
            cores = len(available_cpus()) * jax.process_count()
            devices = cores if platform == "cpu" else program.mesh.size
            clock = StepClock(flops, first_start, saved, devices)
            guard = StepGuard(training.on_bad_step, training.bad_steps, saved, state.step.sharding)
            counters = Counters(stream.directions, groups or {}, saved, start, rows * max(lengths))
        in_flight = StepsInFlight(MOST_IN_FLIGHT.get(platform, 3), clock)
        run = Run(program, state, end, in_flight, clock, guard, counters)
        rows_to = -1 if begun else start  # a new run starts its metrics anew
        written_to = folder if distributed.is_primary() else None
        with (
            watchdog.watched(clock, folder, first_start),
            stop_signals(lambda: run.together or run.stepped) as run.received,
            program.axis_rules(),
            Metrics(written_to, rows_to, saved, training.tensorboard, log) as metrics,
            StepProfile(training.profile, folder / "profile", start, end) as profile,
            contextlib.closing(device_batches(program.mesh, stream, start)) as batches,
        ):
            learned = [] if sampling is None else [sampling]
            save.parts = [counters, clock, guard, metrics, stopper, *learned]
            evaluate = Evaluate(evaluators, metrics, stopper, sampling)
            log_rows = Log(training.log_period, metrics, progress)
            hooks: list[Hook] = [profile, log_rows, evaluate, save]
            if begun:
                evaluate.before(run)
            while run.step < end and not stopper.stopped:
                profile.before(run)
                with clock.waiting(run.step + 1):
                    batch = next(batches)
                run.take(batch)
                for hook in hooks:
                    hook.after(run)
            written = save.whole(run, finished=True)
            if run.stopping:
                raise Interrupted(run.step)
        return Trained(average.used(run.state) if stopper.best is None else stopper.best, written)


@dataclasses.dataclass(frozen=True)
class Log:
    """Hook that guards steps and writes a row of metrics every `period` steps and at the end."""

    period: int
    metrics: Metrics
    progress: Callable[[int, str], None] | None

    def after(self, run: Run) -> None:
        due = run.step % self.period == 0 or run.last
        if due or run.in_flight.most == 1:
            run.catch_up()
        if due:
            row = {**run.counters.row(), **run.clock.row(run.step), **run.guard.row(run.step)}
            self.metrics.write(run.step, row)
        if self.progress is not None:
            self.progress(run.step, run.counters.text)


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Hook that runs the evaluators whose period divides the step, and all at the last step.

    A learned sampler learns only at its period, so that a longer run learns from the same steps.
    """

    evaluators: Sequence[Evaluator]
    metrics: Metrics
    stopper: EarlyStopper
    sampling: LearnedSampling | None

    def after(self, run: Run) -> None:
        learned_from: dict[str, float] = {}
        for evaluator in self.evaluators:
            due = run.step % evaluator.period == 0
            if due or run.last:
                params, values = self._measure(run, evaluator)
                self.stopper.evaluated(run.step, values, params)
                run.measured |= values
                learned_from |= values if due else {}
        learns = self.sampling if learned_from else None
        if learns is not None and (learned := learns.evaluated(run.step, learned_from)):
            self.metrics.write(run.step, learned)
        # The last step of early stopping also says that training has finished.
        run.last = run.last or self.stopper.stopped

    def before(self, run: Run) -> None:
        """Measures, logs and prints the quality of the initial parameters."""
        for evaluator in self.evaluators:
            _, values = self._measure(run, evaluator)
            if distributed.is_primary():
                shown = [f"{name} {values[name]:.4f}" for name in values if name.count("/") < 2]
                print(f"before the first step: {', '.join(shown)}")

    def _measure(self, run: Run, evaluator: Evaluator) -> tuple[Any, dict[str, float]]:
        params = average.used(run.state)
        values = run.pause("evaluate", functools.partial(evaluator.run, params))
        self.metrics.write(run.step, values)
        return params, values


@dataclasses.dataclass
class Save:
    """Hook that saves checkpoints at their periods; the run continues from the latest one.

    It stops training after a signal; `train` saves the end. A checkpoint's note has `about`, and
    the `note()` of each of the `parts`.

    Attributes:
        latest: Step that the run continues from, or None for a new run.
        place: Checkpoint of that step, for messages.
    """

    period: int
    folder: Path
    checkpoints: Checkpoints
    about: Mapping[str, Any]
    stopper: EarlyStopper
    parts: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self.latest = self.checkpoints.latest
        self.place = f"{self.checkpoints.folder}/{self.latest}"

    @functools.cached_property
    def saved(self) -> dict[str, Any]:
        """The note of the latest step, or {}."""
        return {} if self.latest is None else self.checkpoints.note(self.latest)

    def restored(self, program: TrainProgram) -> TrainState:
        """Returns the latest state over the program's mesh, and restores the stopper."""
        assert self.latest is not None
        whats = {"vocabulary": "vocabulary", "stream": "stream", "gradients": "gradient method"}
        for name, what in whats.items():
            there, here = self.saved.get(name), self.about.get(name)
            if name in self.about and there != here:
                raise InputError(
                    f"{self.place} was trained with another {what} "
                    f"({str(there)[:12]} there, {str(here)[:12]} here); "
                    "choose another MODEL_DIR, or start over with --fresh"
                )
        if "averaged" in self.saved:  # made by `m4 average`
            raise InputError(
                f"{self.place} is a mean of checkpoints, without an optimizer's state: begin "
                "another run from its parameters with --init_from"
            )
        like = program.abstract_state()
        items = average.items(like)
        if self.stopper.rule is not None and "best_step" in self.saved:
            items["best"] = items["params"]
        found = self.checkpoints.restore(self.latest, items)
        if "best" in found:
            with undamaged(f"{self.place}/note"):
                self.stopper.resume(self.saved, found["best"])
        at = jax.device_put(np.asarray(self.latest, np.int32), program.shardings.step)
        return average.from_items(like, at, found)

    def after(self, run: Run) -> None:
        if run.last:
            return
        if run.stopping:
            self.whole(run)
            raise Interrupted(run.step)
        if run.step % self.period == 0:
            run.pause("save", lambda: self._start(run))

    def whole(self, run: Run, **more: Any) -> dict[str, Any]:
        """Saves the state and waits for it; returns the checkpoint's note, with `more`."""
        note = run.pause("save", lambda: self._start(run, **more))
        run.pause("save", self.checkpoints.wait)
        return note

    def _start(self, run: Run, **more: Any) -> dict[str, Any]:
        note = {**self.about, **more}
        for part in self.parts:
            note |= part.note()
        note["step"] = run.step
        items = average.items(run.state)
        if self.stopper.best is not None:
            items["best"] = self.stopper.best
        self.checkpoints.save(run.step, items, note, run.measured)
        if distributed.is_primary():
            run.counters.write(self.folder, note)
        return note


def device_batches(
    mesh: Mesh, stream: BatchStream, start: int
) -> Generator[dict[str, jax.Array], None, None]:
    """Yields the batches from step `start` on, over the mesh, making the next one meanwhile."""
    parts = host_shards(mesh)
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(host_batch, stream.batch, start, parts)
        for step in itertools.count(start + 1):
            batch = to_global(mesh, coming.result())
            coming = ahead.submit(host_batch, stream.batch, step, parts)
            yield batch

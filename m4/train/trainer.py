"""Training: batches by number, metrics, evaluations, checkpoints, resume."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import optax
from jax.sharding import Mesh

from m4.model import pipeline
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.parallel.mesh import Rules, axis_rules_context, make_mesh
from m4.progress import ProgressBar
from m4.settings import (
    MUTABLE,
    Between,
    Count,
    Factor,
    OneOf,
    Period,
    Rate,
    Size,
    Steps,
    checked,
)
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import Metrics
from m4.train import average
from m4.train.batches import BatchShape, BatchStream, device_batches
from m4.train.early_stopping import EarlyStopper, EarlyStopping
from m4.train.measuring.metric_window import MetricWindow
from m4.train.measuring.training_counts import DataCounter, ExpertLoadCounter
from m4.train.mesh_checks import check_batches, check_model
from m4.train.preemption import STOP, stop_flags, stop_signals, with_stop_flags
from m4.train.program import TrainProgram
from m4.train.resume import check_same, restore
from m4.train.sampling import LearnedSampling
from m4.train.step import RNGS, make_train_step


@checked
@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        total_steps: where training ends. batch_size: packed rows a step, over all devices.
        optimizer: (total steps) -> optax.GradientTransformation, e.g. `m4.train.optimizer.adamw`.
        seed: of everything that is drawn. mesh: () -> Mesh, of the devices.
        label_smoothing, z_loss, aux_loss_factor, router_z_loss_factor, rng, grad_accum_steps: see
            `m4.train.step.make_train_step`.
        checkpoint_period: steps between checkpoints. keep_checkpoints: so many are kept.
        fsdp_axes: mesh axes over which weights and their statistics are sharded further, see
            `m4.parallel.mesh.shard_further`.
        extra_axis_rules: (logical axis, mesh axis or axes) in addition to those of
            `m4.parallel.axes`, for what these leave whole: ("embed", "model"), ("length", "model").
        log_period: steps between rows of metrics.jsonl. tensorboard: writes TensorBoard files too.
        dev_period: steps between dev losses. dev_pairs: at most so many pairs a direction.
        early_stopping: ends training before total_steps, and keeps the best parameters.
    """

    total_steps: Annotated[Steps, MUTABLE]
    batch_size: Size
    optimizer: Callable[[int], optax.GradientTransformation]
    seed: Count = 0
    mesh: Annotated[Callable[..., Mesh], MUTABLE] = make_mesh
    label_smoothing: Rate = 0.1
    z_loss: Factor = 1e-4
    aux_loss_factor: Factor = 0.01
    router_z_loss_factor: Factor = 0.0
    rng: Annotated[str, OneOf(RNGS)] = "unsafe_rbg"
    grad_accum_steps: Size = 1
    checkpoint_period: Annotated[Period, MUTABLE] = 500
    keep_checkpoints: Annotated[int, Between(1, 10**6), MUTABLE] = 3
    fsdp_axes: Annotated[Sequence[str], MUTABLE] = ("fsdp",)
    extra_axis_rules: Annotated[Rules, MUTABLE] = ()
    log_period: Annotated[Period, MUTABLE] = 25
    tensorboard: Annotated[bool, MUTABLE] = True
    dev_period: Annotated[Period, MUTABLE] = 1000
    dev_pairs: Annotated[Period, MUTABLE] = 200
    early_stopping: EarlyStopping | None = None


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """What is measured every `period` steps and at the end: run(params) -> {name: number}."""

    period: int
    run: Callable[[Any], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters to use (the best ones with early stopping, averages where the optimizer makes
    them) and the note of the last checkpoint."""

    params: Any
    note: dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during training; `step` is saved."""

    def __init__(self, step: int):
        super().__init__(f"interrupted at step {step} (saved); run the same command to resume")
        self.step = step


class Trainer:
    """One model on one mesh: its training step, its layout for decoding, and its training.

    Attributes:
        training, model, directions, mesh: as given; directions are names such as "en-gl".
    """

    def __init__(
        self,
        training: Training,
        model: Transformer,
        directions: Sequence[str],
        mesh: Mesh,
        batch_shapes: Sequence[BatchShape] = (),
    ):
        """Nothing is computed, read or written.

        Args:
            batch_shapes: (rows, source length, target length) that batches can have; () if none
                will come.

        Raises:
            SettingError: sizes of the model or of batches that do not divide over the mesh.
        """
        self.training, self.model, self.mesh = training, model, mesh
        self.directions = list(directions)
        self._check(batch_shapes)

    def _check(self, batch_shapes: Sequence[BatchShape]) -> None:
        training = self.training
        with axis_rules_context(self.mesh, training.extra_axis_rules):
            parts = training.grad_accum_steps
            check_batches(self.mesh, self.model, batch_shapes, training.batch_size, parts)
            check_model(self.mesh, self.model)

    @functools.cached_property
    def program(self) -> TrainProgram:
        """The training step, to be compiled."""
        training = self.training
        optimizer = training.optimizer(training.total_steps)
        step = make_train_step(
            self.model,
            optimizer,
            directions=len(self.directions),
            seed=training.seed,
            label_smoothing=training.label_smoothing,
            z_loss=training.z_loss,
            aux_loss_factor=training.aux_loss_factor,
            router_z_loss_factor=training.router_z_loss_factor,
            grad_accum_steps=training.grad_accum_steps,
            rng=training.rng,
        )
        return TrainProgram(
            step,
            self.model,
            optimizer,
            self.mesh,
            training.seed,
            training.fsdp_axes,
            training.extra_axis_rules,
        )

    def layout(self) -> Layout | None:
        """How the model is sharded when it decodes: as in training; None: on one device.

        Lengths are never sharded (rules for "length" are left out): a step of decoding has one
        position.
        """
        if self.mesh.size == 1:
            return None
        rules = [rule for rule in self.training.extra_axis_rules if rule[0] != "length"]
        return Layout(self.mesh, self.training.fsdp_axes, rules)

    def run(
        self,
        folder: Path | str,
        stream: BatchStream,
        *,
        evaluators: Sequence[Evaluator] = (),
        sampling: LearnedSampling | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        note: Mapping[str, Any] | None = None,
        progress: ProgressBar | None = None,
    ) -> Trained:
        """Trains to `total_steps`, from the latest checkpoint of `folder` or from the beginning.

        Writes folder/checkpoints/<step> every `checkpoint_period` steps and at the end,
        folder/metrics.jsonl and folder/tensorboard every `log_period` steps; with a model that
        counts directions, folder/atlas.train.json with every checkpoint
        (`m4.train.measuring.routing_counts`). A run that was killed and started again takes the
        same steps as one that was not: batches, dropout and routing are functions of (seed, step).

        Of several processes each gives its host batch and saves its local shards; the primary one
        writes the other files.

        Args:
            folder: the model's. stream: the batches, of the trainer's directions.
            evaluators: run in this order.
            sampling: learns from evaluations how often directions are drawn.
            groups: resource level -> directions, for the loss that is shown.
            note: JSON that goes into every checkpoint (fingerprints of data, vocabulary, config).
            progress: where progress is shown.

        Raises:
            SettingError: batches that do not divide over the mesh.
            ValueError: a checkpoint of another stream or vocabulary; a step whose loss or gradient
                is not finite.
            Interrupted: Ctrl-C or SIGTERM, in any process; the step is saved first.
        """
        assert list(stream.directions) == self.directions
        self._check(stream.shapes)
        about = {**(note or {}), "stream": stream.fingerprint(), "directions": stream.directions}
        if stages := pipeline.about(self.mesh, self.model):
            about["pipeline"] = stages
            _print_stages(stages)
        folder = Path(folder)
        keep = self.training.keep_checkpoints
        with contextlib.closing(Checkpoints(folder / "checkpoints", keep=keep)) as checkpoints:
            run = _Run(self, folder, checkpoints, about, groups or {}, sampling)
            run.steps(stream, evaluators, progress)
            written = run.save(finished=True)
            checkpoints.wait()
            best = run.stopper.best
            return Trained(average.used(run.state) if best is None else best, written)


class _Run:
    """One run in a folder: the state, and what its checkpoints keep alongside."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        checkpoints: Checkpoints,
        about: Mapping[str, Any],
        groups: Mapping[str, Sequence[str]],
        sampling: LearnedSampling | None,
    ):
        """Takes up the latest checkpoint, or makes a new state."""
        self._trainer, self._folder, self._checkpoints = trainer, folder, checkpoints
        self._about, self._sampling = about, sampling
        latest = distributed.on_primary_then_broadcast(
            "latest checkpoint", lambda: checkpoints.latest
        )
        saved = {} if latest is None else checkpoints.note(latest)
        if latest is not None:
            check_same(f"{checkpoints.folder}/{latest}", saved, about)
        if sampling is not None:
            sampling.resume(saved.get("sampling"))
        self.state = trainer.program.new_state()
        self.stopper = EarlyStopper(trainer.training.early_stopping)
        if latest is not None:
            self.state = restore(checkpoints, latest, saved, self.state, self.stopper)
        self._start = int(self.state.step)
        self._counters = _Counters(trainer.directions, groups, saved, self._start)

    def steps(
        self,
        stream: BatchStream,
        evaluators: Sequence[Evaluator],
        progress: ProgressBar | None,
    ) -> None:
        """Steps until total_steps, early stopping or a signal; checkpoints but for the last one."""
        training, program, mesh = self._trainer.training, self._trainer.program, self._trainer.mesh
        together = distributed.is_distributed()
        jitted = program.jit(with_stop_flags(program.step) if together else program.step)
        compiled = distributed.SynchronizedProgram(jitted, "the step's program")
        folder = self._folder if distributed.is_primary() else None
        with (
            program.axis_rules(),
            Metrics(folder, resume_step=self._start, tensorboard=training.tensorboard) as metrics,
            contextlib.closing(device_batches(mesh, stream, self._start)) as batches,
            stop_signals() as received,
        ):
            for step in range(self._start + 1, training.total_steps + 1):
                if self.stopper.stopped:
                    break
                batch = next(batches)
                if together:
                    batch[STOP] = stop_flags(mesh, bool(received))
                self.state, step_metrics = compiled(self.state, batch)
                # One step at a time: on few cores, more than two steps with collectives in
                # flight deadlock in XLA's thread pool.
                step_metrics = jax.block_until_ready(step_metrics)
                stop = int(step_metrics.pop(STOP)) if together else received
                self._counters.add(step, step_metrics)
                last = step == training.total_steps
                if step % training.log_period == 0 or last:
                    metrics.write(step, self._counters.row())
                if progress is not None:
                    progress.update(step, self._counters.text)
                self._evaluate(evaluators, step, last, metrics)
                if stop:
                    self.save()
                    self._checkpoints.wait()
                    raise Interrupted(step)
                if step % training.checkpoint_period == 0 and not last:
                    self.save()

    def _evaluate(
        self, evaluators: Sequence[Evaluator], step: int, last: bool, metrics: Metrics
    ) -> None:
        """Runs the evaluators whose period divides the step, at the last step all.

        A learned sampler takes only what was measured at its period: a run that is made longer
        afterwards learns from the same steps.
        """
        measured: dict[str, float] = {}
        params = average.used(self.state)
        for evaluator in evaluators:
            due = step % evaluator.period == 0
            if due or last:
                values = evaluator.run(params)
                metrics.write(step, values)
                self.stopper.evaluated(step, values, params)
                measured |= values if due else {}
        if self._sampling is not None and measured:
            metrics.write(step, self._sampling.evaluated(step, measured))

    def save(self, **more: Any) -> dict[str, Any]:
        """Starts to save the state; returns the checkpoint's note, with `more`."""
        learned = {} if self._sampling is None else self._sampling.note()
        step = int(self.state.step)
        counted = self._counters.note()
        note = {**self._about, **more, **counted, **learned, **self.stopper.note(), "step": step}
        items = average.items(self.state)
        if self.stopper.best is not None:
            items["best"] = self.stopper.best
        self._checkpoints.save(step, items, note)
        if distributed.is_primary():
            self._counters.write(self._folder, note)
        return note


class _Counters:
    """What is summed over steps: until the next row of metrics, and over the whole run.

    Sums over the run are in checkpoints' notes, so that a resumed run continues to count.
    """

    def __init__(
        self,
        directions: Sequence[str],
        groups: Mapping[str, Sequence[str]],
        saved: Mapping[str, Any],
        start: int,
    ):
        self._loads = ExpertLoadCounter(directions, saved.get("seated"), start)
        self._data = DataCounter(directions, saved.get("seen"), start)
        self._window = MetricWindow(directions, groups)

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes what a step returned. Raises NotFinite."""
        self._loads.add(metrics.pop("expert_loads"))
        self._data.add(metrics.pop("data_counts"))
        self._window.add(step, metrics)

    def row(self) -> dict[str, float]:
        """The metrics since the last row."""
        self._loads.flush()
        return {**self._window.flush(), **self._data.flush()}

    @property
    def text(self) -> str:
        return self._window.text

    def note(self) -> dict[str, Any]:
        return {**self._loads.note(), **self._data.note()}

    def write(self, folder: Path, note: Mapping[str, Any]) -> None:
        self._loads.write(folder, note)


def _print_stages(stages: Mapping[str, Any]) -> None:
    if distributed.is_primary():
        print(
            f"pipeline: {stages['stages']} stages, {stages['microbatches']} microbatches; "
            f"each stack's stages are idle for {stages['bubble']:.1%} of its ticks"
        )

"""A model, its training step and its mesh: what trains, plans and decoding start from."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from m4.model import pipeline
from m4.model.transformer import Transformer
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.parallel.mesh import axis_rules_context
from m4.progress import ProgressBar
from m4.storage.checkpoints import Checkpoints
from m4.train import average
from m4.train.loop.batches import BatchShape, BatchStream
from m4.train.loop.mesh_checks import check_batches, check_model
from m4.train.loop.program import TrainProgram
from m4.train.loop.run import Begin, Evaluator, TrainingRun
from m4.train.measuring.step_clock import Flops
from m4.train.multitask.grouped import DirectionGroups, direction_groups
from m4.train.multitask.groups import Directions, by_direction
from m4.train.sampling import LearnedSampling
from m4.train.step import make_train_step
from m4.train.training import Training


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters to use (the best ones with early stopping, averages where the optimizer makes
    them) and the note of the last checkpoint."""

    params: Any
    note: dict[str, Any]


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
        known: Directions | None = None,
    ):
        """Nothing is computed, read or written.

        Args:
            known: the directions' sizes and resource levels; None: assumed, there is no corpus.
            batch_shapes: (rows, source length, target length) that batches can have; () if none
                will come.

        Raises:
            SettingError: sizes of the model or of batches that do not divide over the mesh.
        """
        self.training, self.model, self.mesh = training, model, mesh
        self.directions = list(directions)
        self._known = known or Directions.assumed(self.directions)
        self._check(batch_shapes)

    def _check(self, batch_shapes: Sequence[BatchShape]) -> None:
        training = self.training
        with axis_rules_context(self.mesh, training.extra_axis_rules):
            parts = training.grad_accum_steps
            check_batches(self.mesh, self.model, batch_shapes, training.batch_size, parts)
            check_model(self.mesh, self.model)

    @functools.cached_property
    def loss_weights(self) -> np.ndarray | None:
        """[directions]; None: all 1."""
        given = self.training.loss_weights
        return None if given is None else by_direction("Training.loss_weights", given, self._known)

    def check_directions(self) -> None:
        """SettingError: a setting that names a direction which is not the trainer's."""
        _ = self.loss_weights, self.groups
        if self.training.cosines is not None:
            self.training.cosines.of(self._known)

    @functools.cached_property
    def groups(self) -> DirectionGroups | None:
        """Of directions whose gradients a step alters, or that have separate rates."""
        rates, known = self.training.learning_rates, self._known
        rates_D = None if rates is None else by_direction("Training.learning_rates", rates, known)
        return direction_groups(self.training.gradients, rates_D, known)

    @functools.cached_property
    def program(self) -> TrainProgram:
        """The training step, to be compiled."""
        training, groups = self.training, self.groups
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
            loss_weights=self.loss_weights,
            groups=groups,
        )
        return TrainProgram(
            step,
            self.model,
            optimizer if groups is None else groups.with_state(optimizer),
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
        flops: Flops | None = None,
        begin: Begin | None = None,
        progress: ProgressBar | None = None,
    ) -> Trained:
        """Trains to `total_steps`, from the latest checkpoint of `folder` or from the beginning.

        Writes folder/checkpoints/<step> every `checkpoint_period` steps and at the end,
        folder/metrics.jsonl and folder/tensorboard every `log_period` steps, the files of
        `m4.train.measuring.watchdog`, and of a model that counts directions atlas.train.json. A run
        that was killed and started again takes the same steps as one that was not: batches, dropout
        and routing are functions of (seed, step).

        Of several processes each gives its host batch and saves its local shards; the primary one
        writes the other files.

        Args:
            folder: the model's. stream: the batches, of the trainer's directions.
            evaluators: run in this order.
            sampling: learns from evaluations how often directions are drawn.
            groups: resource level -> directions, for the loss that is shown.
            note: JSON that goes into every checkpoint (fingerprints of data, vocabulary, config).
            begin: makes the state before the first step; None: of random numbers.
            flops: of a step and of the devices, for the share that is used (MFU).
            progress: where progress is shown.

        Raises:
            SettingError: batches that do not divide over the mesh.
            ValueError: a checkpoint of another stream or vocabulary. BadStep: a step whose numbers
                are bad, where that ends training (`m4.train.bad_steps`).
            Interrupted: Ctrl-C or SIGTERM, in any process; the step is saved first.
        """
        assert list(stream.directions) == self.directions
        self._check(stream.shapes)
        folder, training = Path(folder), self.training
        about = self._about(stream, note or {})
        program, groups = self.program, groups or {}
        given = (stream, about, groups, sampling, flops, begin)
        with contextlib.closing(_checkpoints(training, folder)) as checkpoints:
            run = TrainingRun(training, program, folder, checkpoints, *given)
            written, best = run.train(evaluators, progress), run.stopper.best
            return Trained(average.used(run.state) if best is None else best, written)

    def _about(self, stream: BatchStream, note: Mapping[str, Any]) -> dict[str, Any]:
        """What every checkpoint of the run says about it."""
        about = {**note, "stream": stream.fingerprint(), "directions": stream.directions}
        about |= self.groups.note() if self.groups else {}
        if stages := pipeline.about(self.mesh, self.model):
            about["pipeline"] = stages
            _print_stages(stages)
        return about


def _print_stages(stages: Mapping[str, Any]) -> None:
    if distributed.is_primary():
        print(
            f"pipeline: {stages['stages']} stages, {stages['microbatches']} microbatches; "
            f"each stack's stages are idle for {stages['bubble']:.1%} of its ticks"
        )


def _checkpoints(training: Training, folder: Path) -> Checkpoints:
    return Checkpoints(
        folder / "checkpoints",
        keep=training.keep_checkpoints,
        keep_period=training.keep_period,
        keep_best=training.keep_best,
    )

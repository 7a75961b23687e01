"""The former way to train: `m4.train.trainer.Trainer`, by the names of its former settings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh

from m4.model.transformer import Transformer
from m4.parallel.mesh import Rules
from m4.progress import ProgressBar
from m4.train.batches import BatchStream
from m4.train.early_stopping import EarlyStopping
from m4.train.program import jit_step
from m4.train.sampling import LearnedSampling
from m4.train.trainer import Evaluator, Interrupted, Trained, Trainer, Training

__all__ = ["BatchStream", "Evaluator", "Interrupted", "Program", "Trained", "jit_step", "train"]


class Program(NamedTuple):
    """What a step is compiled from."""

    step: Callable[..., Any]
    optimizer: optax.GradientTransformation
    zero: Sequence[str]
    rules: Rules


def train(
    folder: Path | str,
    model: Transformer,
    stream: BatchStream,
    optimizer: Callable[[int], optax.GradientTransformation],
    mesh: Mesh,
    *,
    total_steps: int,
    seed: int = 0,
    label_smoothing: float = 0.1,
    z_loss: float = 1e-4,
    aux_loss_factor: float = 0.01,
    router_z_loss_factor: float = 0.0,
    rng: str = "unsafe_rbg",
    accumulate: int = 1,
    checkpoint_period: int = 500,
    keep: int = 3,
    zero: Sequence[str] = ("fsdp",),
    rules: Rules = (),
    log_period: int = 25,
    evaluators: Sequence[Evaluator] = (),
    early_stopping: EarlyStopping | None = None,
    sampling: LearnedSampling | None = None,
    groups: Any = None,
    note: Any = None,
    tensorboard: bool = True,
    stage: ProgressBar | None = None,
    instead: Callable[[Program], Any] | None = None,
) -> Trained:
    """See `Training` and `Trainer.run`."""
    training = Training(
        total_steps=total_steps,
        batch_size=stream.shapes[0][0] if stream.shapes else 1,
        optimizer=optimizer,
        seed=seed,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        aux_loss_factor=aux_loss_factor,
        router_z_loss_factor=router_z_loss_factor,
        rng=rng,
        grad_accum_steps=accumulate,
        checkpoint_period=checkpoint_period,
        keep_checkpoints=keep,
        fsdp_axes=zero,
        extra_axis_rules=rules,
        log_period=log_period,
        tensorboard=tensorboard,
        early_stopping=early_stopping,
    )
    trainer = Trainer(training, model, stream.directions, mesh, stream.shapes)
    if instead is not None:
        program = trainer.program
        with program.axis_rules():
            return instead(Program(program.step, program.optimizer, zero, rules))
    return trainer.run(
        folder,
        stream,
        evaluators=evaluators,
        sampling=sampling,
        groups=groups,
        note=note,
        progress=stage,
    )

"""`m4 train`: trains the model, from its latest checkpoint where there is one."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from m4.jobs import command

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from m4.data.cache.cache import Cache
    from m4.data.samplers.learned import Learned
    from m4.data.stream.stream import Stream
    from m4.experiment import Experiment, Training
    from m4.model.transformer import Transformer
    from m4.train.loop.run import Evaluator
    from m4.train.measuring.step_clock import Flops
    from m4.train.sampling import LearnedSampling

EXAMPLE = "m4 train --gin_file=gin_configs/demo.gin --gin.TRAIN_STEPS=2000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_config(parser)
    command.add_processes(parser)
    add_start(parser)
    command.add_dense(parser)
    command.add_dry_run(parser)
    command.add_verify(parser)


def add_start(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh, --init_from and --keep_optimizer: from where training begins."""
    parser.add_argument(
        "--fresh", action="store_true", help="remove what m4 wrote there and start over"
    )
    parser.add_argument(
        "--init_from",
        metavar="RUN[@STEP]",
        help="begin from the model of another run's folder, or from a checkpoint of T5X "
        "(INITIAL_CHECKPOINT_PATH)",
    )
    parser.add_argument(
        "--keep_optimizer",
        action="store_true",
        help="with --init_from: continue at its step, with its optimizer's state",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit status."""
    with command.experiment_of(arguments) as (experiment, config):
        if arguments.dry_run:
            return command.dry_run(experiment, arguments)
        from m4.jobs.open_run import open_run

        with open_run(experiment, config, "train", fresh=arguments.fresh) as run:
            train(run.experiment, dense=arguments.compare == "dense")
        command.print_next(experiment, config, "eval")
    return 0


def train(experiment: Experiment, *, dense: bool = False) -> Path:
    """Trains the model (or, `dense`, the same without experts); returns its folder.

    A folder that has as many steps already is left as it is, and a line is printed.

    Raises:
        SettingError: sizes that cannot be, before the corpus is built.
        m4.train.loop.run.Interrupted: Ctrl-C or SIGTERM; the step is saved.
    """
    from m4.eval.decoding.testsets import train_pairs
    from m4.jobs import prepare
    from m4.jobs.checkpoints.initial import beginning, check_beginning
    from m4.jobs.corpus import arrays, keep_vocabulary, open_corpus
    from m4.parallel import distributed
    from m4.progress import ProgressBar
    from m4.storage.steps import whole_step

    training = experiment.training
    folder = prepare.model_folder(experiment, dense)
    if dense:
        experiment = experiment.dense()
    mesh = prepare.check_sizes(experiment)
    latest = distributed.on_primary_then_broadcast(
        "checkpoints", lambda: whole_step(folder / "checkpoints", move_aside=True)
    )
    if latest is None:
        check_beginning(experiment)
    cache = open_corpus(experiment, arrays)
    if distributed.is_primary():
        keep_vocabulary(experiment, cache)
    if latest is not None and latest >= training.total_steps:
        if distributed.is_primary():
            print(
                f"already at step {latest}, nothing to train to {training.total_steps} "
                f"(TRAIN_STEPS): {folder}"
            )
        return folder
    model = prepare.model_for(experiment, cache)
    stream = prepare.training_stream(experiment, cache)
    trainer = prepare.trainer_of(experiment, model, stream.directions, mesh, stream.shapes, cache)
    begins = beginning(experiment, model, cache) if latest is None else None
    if begins is not None:
        begins.report(folder)
    with ProgressBar("train dense" if dense else "train", training.total_steps) as bar:
        trainer.run(
            folder,
            stream,
            evaluators=_evaluators(experiment, cache, stream, model, mesh),
            sampling=learned_sampling(experiment, cache, stream),
            groups=prepare.levels_of(experiment, cache),
            note={
                "vocabulary": cache.vocabulary.fingerprint,
                "corpus": cache.fingerprint,
                "train_pairs": train_pairs(cache),
                "manifest": cache.summary(),
            },
            flops=_flops(model, stream, mesh),
            begin=begins.state if begins else None,
            progress=bar,
        )
    return folder


def _evaluators(
    experiment: Experiment, cache: Cache, stream: Stream, model: Transformer, mesh: Mesh
) -> list[Evaluator]:
    """Dev losses and, where they are asked for, cosines of gradients."""
    from m4.jobs import prepare
    from m4.train.loop.run import Evaluator
    from m4.train.measuring.dev import dev_loss
    from m4.train.multitask.cosines import gradient_cosines

    training = experiment.training
    losses = dev_loss(cache, stream, model, mesh, training.dev_pairs)
    made = [Evaluator(training.dev_period, losses)]
    if (cosines := training.cosines) is not None:
        known = prepare.known_of(experiment, cache, stream.directions)
        run = gradient_cosines(cache, stream, model, mesh, cosines, known)
        made.append(Evaluator(cosines.period, run))
    return made


def _flops(model: Transformer, stream: Stream, mesh: Mesh) -> Flops:
    """What MFU is made of; the primary process alone writes it."""
    from m4.parallel import distributed
    from m4.plan.flops import forward_flops, model_flops
    from m4.plan.peaks import peak_flops
    from m4.train.measuring.step_clock import Flops

    peak = peak_flops([*mesh.devices.flat], model.dtype) if distributed.is_primary() else math.inf
    return Flops({s: model_flops(forward_flops(model, *s)) for s in stream.shapes}, peak)


def learned_sampling(
    experiment: Experiment, cache: Cache, stream: Stream
) -> LearnedSampling | None:
    """Where the sampler learns: what joins it to the stream."""
    from m4.data.samplers.learned import Learned
    from m4.data.stream import mixture
    from m4.train.sampling import LearnedSampling

    data, training = experiment.data, experiment.training
    if not isinstance(data.sampler, Learned):
        return None
    start = data.sampler(mixture.sizes(cache, data.sample_by))
    unit = mixture.units(cache, data.sample_by)
    return LearnedSampling(
        data.sampler,
        start,
        lambda rates: mixture.pair_rates(rates, unit),
        stream,
        _measured(training, data.sampler),
    )


def _measured(training: Training, sampler: Learned) -> dict[str, Any]:
    """The settings that decide when and on what a sampler learns."""
    from m4.data.samplers.learned import ALIGNMENT
    from m4.experiment import identity

    if sampler.reads == ALIGNMENT and (cosines := training.cosines) is not None:
        periods = {"period": cosines.period, "pairs": cosines.pairs}
        about = {**periods, "groups": identity(cosines.groups)}
        return {f"GradientCosines.{name}": value for name, value in about.items()}
    return {"Training.dev_period": training.dev_period, "Training.dev_pairs": training.dev_pairs}

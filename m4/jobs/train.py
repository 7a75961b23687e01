"""`m4 train`: trains the model, from its latest checkpoint where there is one."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from m4.jobs import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from m4.data.cache.cache import Cache
    from m4.experiment import Experiment
    from m4.jobs.checkpoints.source import Source

EXAMPLE = "m4 train --gin_file=gin_configs/demo.gin --gin.TRAIN_STEPS=2000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    add_start(parser)
    command.add_flags(parser, "dry_run", "verify")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh, --init_from and --keep_optimizer: from where training begins."""
    parser.add_argument(
        "--fresh", action="store_true", help="remove what m4 wrote there and start over"
    )
    parser.add_argument(
        "--init_from",
        metavar="RUN[@STEP]",
        help="begin from the model of another run's folder, a checkpoint of T5X, or a pretrained "
        "model in Hugging Face's layout (INITIAL_CHECKPOINT_PATH)",
    )
    parser.add_argument(
        "--keep_optimizer",
        action="store_true",
        help="with --init_from: continue at its step, with its optimizer's state",
    )


def run(arguments: argparse.Namespace) -> None:
    """Trains."""
    if command.dry_run(arguments):
        return
    with command.opened(arguments, "train", fresh=arguments.fresh) as run:
        check_and_train(run.experiment)
    command.print_next(run, "eval")


def check_and_train(
    experiment: Experiment, *, log: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """Checks, opens or builds the corpus, and trains; returns the model's folder.

    `log` is called with each row of metrics.
    """
    from m4.jobs.checkpoints.initial import check_start
    from m4.jobs.corpus import arrays, keep_vocabulary, open_corpus
    from m4.parallel import distributed

    start = check_start(experiment)
    corpus = open_corpus(experiment, arrays)
    if distributed.is_primary():
        keep_vocabulary(experiment, corpus)
    return train(experiment, corpus, *start, log)


def train(
    experiment: Experiment,
    corpus: Cache,
    step: int | None,
    source: Source | None,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Trains a model from a step, or from another model; returns its folder.

    A folder that has as many steps already is left as it is, and a line is printed. `log` is called
    with each row of metrics.
    """
    from m4.build import build
    from m4.eval.decoding.testsets import train_pairs
    from m4.jobs.checkpoints import initial
    from m4.parallel import distributed
    from m4.plan.flops import forward_flops, model_flops
    from m4.plan.peaks import peak_flops
    from m4.progress import ProgressBar
    from m4.storage.checkpoints import read_note
    from m4.train import loop
    from m4.train.measuring.step_clock import Flops

    training, folder = experiment.training, experiment.folder
    rule, ended = training.early_stopping, None
    if step is not None and step >= training.total_steps:
        ended = f"nothing to train to {training.total_steps} (TRAIN_STEPS)"
    elif step is not None and rule is not None:
        ended = rule.stopped(read_note(folder, step))
    if ended is not None:
        if distributed.is_primary():
            print(f"already at step {step}, {ended}: {folder}")
        return folder
    parts, begin = build(experiment, corpus), None
    note = {
        "vocabulary": corpus.vocabulary.fingerprint,
        "corpus": corpus.fingerprint,
        "train_pairs": train_pairs(corpus),
    }
    peak = math.inf  # the primary process alone writes the share of it that is used
    if distributed.is_primary():
        peak = peak_flops([*parts.mesh.devices.flat], parts.model.dtype)
    flops = Flops(model_flops(forward_flops(parts.model, *parts.batch_shape)), peak)
    if source is not None:
        begin = initial.begin(experiment, source, parts.model, corpus)
    with ProgressBar("train", training.total_steps) as bar:
        trained = loop.train(
            parts.program,
            training,
            folder,
            parts.stream,
            evaluators=parts.evaluators(),
            sampling=parts.sampling(),
            groups=parts.trained.levels,
            note=note,
            flops=flops,
            begin=begin,
            progress=bar.update,
            log=log,
        )
    if rule is not None and distributed.is_primary() and (said := rule.stopped(trained.note)):
        print(said)
    return folder

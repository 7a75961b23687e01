"""`m4 train`: trains the model, from its latest checkpoint where there is one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from m4.jobs import command

if TYPE_CHECKING:
    from collections.abc import Callable

    from m4.data.cache.cache import Cache
    from m4.experiment import Experiment
    from m4.jobs.checkpoints.initial import Source

EXAMPLE = "m4 train --gin_file=gin_configs/demo.gin --gin.TRAIN_STEPS=2000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    add_start(parser)
    command.add_flags(parser, "dry_run", "verify")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh, --init_from and --keep_optimizer, which say where training begins."""
    text = "remove what m4 wrote in the run folder and start over"
    parser.add_argument("--fresh", action="store_true", help=text)
    text = "begin from the model of another run folder, a T5X checkpoint, or a pretrained "
    text += "model in Hugging Face's layout (INITIAL_CHECKPOINT_PATH)"
    parser.add_argument("--init_from", metavar="RUN[@STEP]", help=text)
    text = "with --init_from: continue at its step, with its optimizer state"
    parser.add_argument("--keep_optimizer", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Trains the model."""
    if command.dry_run(arguments):
        return
    with command.opened(arguments, "train", fresh=arguments.fresh) as run:
        check_and_train(run.experiment)
    command.print_next(run, "eval")


def check_and_train(
    experiment: Experiment, *, log: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Checks the config, opens or builds the corpus, and trains; `log` gets each row of metrics."""
    from m4.jobs.checkpoints.initial import check_start
    from m4.jobs.corpus import arrays, open_corpus

    start = check_start(experiment)
    corpus = open_corpus(experiment, arrays)
    train(experiment, corpus, *start, log)


def train(
    experiment: Experiment, corpus: Cache, step: int | None, source: Source | None,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> None:  # fmt: skip
    """Trains from a step, or from another model, unless all steps are done already."""
    from m4.build import build
    from m4.jobs.checkpoints import initial
    from m4.jobs.corpus import keep_vocabulary
    from m4.parallel import distributed
    from m4.progress import ProgressBar
    from m4.storage.checkpoints import read_note
    from m4.train import loop

    keep_vocabulary(experiment, corpus)
    training, folder = experiment.training, experiment.folder
    rule, ended = training.early_stopping, None
    if step is not None and step >= training.total_steps:
        ended = f"nothing to train to {training.total_steps} (TRAIN_STEPS)"
    elif step is not None and rule is not None:
        ended = rule.stopped(read_note(folder, step))
    if ended is not None:
        if distributed.is_primary():
            print(f"already at step {step}, {ended}: {folder}")
        return
    parts, begin = build(experiment, corpus), None
    if source is not None:
        begin = initial.begin(experiment, source, parts.model, corpus)
    with ProgressBar("train", training.total_steps) as bar:
        trained = loop.train(
            parts.program, training, folder, parts.stream, evaluators=parts.evaluators(),
            sampling=parts.sampling(), groups=parts.trained.levels, note=parts.note,
            flops=parts.flops, begin=begin, progress=bar.update, log=log,
        )  # fmt: skip
    if rule is not None and distributed.is_primary() and (said := rule.stopped(trained.note)):
        print(said)

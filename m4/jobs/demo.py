"""`m4 demo`: runs all steps: corpus, training, baselines, decoding, scores, ΔBLEU and plot."""

import argparse
from typing import TYPE_CHECKING

from m4.jobs import command, train
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.experiment import Experiment

EXAMPLE = "m4 demo --gin_file=gin_configs/demo.gin --model_dir=runs/mine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    train.add_start(parser)
    command.add_flags(parser, "dry_run", "verify")


def run(arguments: argparse.Namespace) -> None:
    """Runs all steps."""
    if command.dry_run(arguments):
        return
    with command.experiment_of(arguments) as (experiment, config):
        from m4.jobs.open_run import open_run
        from m4.parallel import distributed

        if distributed.is_distributed():
            raise InputError("one process does all of the demo; several can share `m4 train`")
        kinds = ("train", "eval", "baselines")
        with open_run(experiment, config, *kinds, fresh=arguments.fresh) as run:
            demo(run.experiment)


def demo(experiment: "Experiment") -> None:
    """Runs all steps, and skips those whose results exist."""
    from m4.eval.decoding.testsets import check_held_out
    from m4.jobs.bilingual import baselines, check_baselines
    from m4.jobs.checkpoints.initial import check_start
    from m4.jobs.corpus import open_corpus
    from m4.jobs.decoding.report import report, show
    from m4.jobs.decoding.testsets import decode

    # Requirements of later steps are checked before the training.
    check_baselines(experiment)
    start = check_start(experiment)
    corpus = open_corpus(experiment)
    check_held_out(corpus)
    train.train(experiment, corpus, *start)
    baselines(experiment)
    decode(experiment)
    show(report(experiment), experiment.data.levels)

"""`m4 data prepare`: builds the corpus alone, on a machine without accelerators."""

import argparse
import contextlib

from m4.jobs import command
from m4.settings import counted

EXAMPLE = "m4 data prepare --gin_file=gin_configs/demo.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_run(parser)
    command.add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Builds the corpus in MODEL_DIR/data or Data.data_dir, or checks what is there."""
    with command.experiment_of(arguments) as (experiment, config):
        from m4.jobs.corpus import opened_or_built, place_of
        from m4.jobs.open_run import open_run

        with contextlib.ExitStack() as stack:
            built = experiment
            if experiment.data.data_dir is None:
                opened = open_run(experiment, config, "data", computes=False)
                built = stack.enter_context(opened).experiment
            cache = opened_or_built(built)
        names = cache.language_pairs()
        pairs = sum(cache.size(name, "train") for name in names)
        print(
            f"{place_of(experiment)}: {counted(pairs, 'training pair')} in "
            f"{counted(len(names), 'pair')} of languages, "
            f"corpus {cache.fingerprint}"
        )
    return 0

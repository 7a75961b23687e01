"""`m4 average`: makes a run folder with the mean of several checkpoints' parameters."""

import argparse

from m4.jobs import command
from m4.settings import InputError, pasted

EXAMPLE = "m4 average runs/demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    group = parser.add_mutually_exclusive_group()
    text = "average the last N checkpoints (default: all)"
    group.add_argument("--last", type=int, metavar="N", help=text)
    group.add_argument("--steps", help="average these checkpoints, such as 1000,2000")
    text = "the new run's folder (default: RUN-average<number>-<last step>)"
    parser.add_argument("--output", help=text)
    command.add_flags(parser, "verify")


def run(arguments: argparse.Namespace) -> None:
    """Averages checkpoints of a run into a new folder."""
    if arguments.last is not None and arguments.last < 2:
        raise InputError(f"--last={arguments.last}: must be 2 or more")
    asked = None if arguments.steps is None else command.steps_of(arguments.steps)
    with command.experiment_of(arguments) as (experiment, config):
        from m4.jobs.checkpoints import average
        from m4.jobs.open_run import open_run

        with open_run(experiment, config, computes=False) as run:
            steps = average.chosen_steps(run.folder, arguments.last, asked)
            beside = f"{experiment.model_dir.rstrip('/')}-average{len(steps)}-{steps[-1]}"
            place = arguments.output or beside
            made = command.read_config(arguments, average.bindings(experiment, run.folder), place)
            with open_run(made.experiment(), made, "train") as output:
                average.average(run.experiment, output.experiment, steps)
    listed = ", ".join(map(str, steps))
    print(f"{place}: the mean of steps {listed}; next: {pasted('eval', f'--model_dir={place}')}")

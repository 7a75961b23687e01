"""`m4 export`: writes a run's model as a checkpoint that T5X can continue from."""

import argparse
from pathlib import Path

from m4.jobs import command

EXAMPLE = "m4 export runs/demo --format=t5x --output=exported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_run_folder(parser)
    parser.add_argument(
        "--format", choices=["t5x"], required=True, help="whose checkpoint to write"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="a new folder, a MODEL_DIR of T5X"
    )
    parser.add_argument(
        "--step", type=int, help="a checkpoint that is kept (default: the last whole one)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exports a checkpoint; returns the exit status."""
    from m4.jobs.checkpoints.export import export

    print(export(command.run_of(arguments), arguments.step, arguments.output))
    return 0

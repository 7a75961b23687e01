"""The folder of a run, and the console that jobs print to."""

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from m4.experiment import Experiment


def run_folder(experiment: Experiment) -> Path:
    """Returns MODEL_DIR."""
    return Path(experiment.model_dir)


def model_folder(experiment: Experiment, dense: bool = False) -> Path:
    """Returns the folder of a model's checkpoints and decodes."""
    folder = run_folder(experiment)
    return folder / "compare" / "dense" if dense else folder


def console() -> Console:
    """80 columns are rich's guess where there is no terminal: too few for the tables."""
    return Console(width=None if sys.stdout.isatty() else 120)


def print_files(terminal: Console, paths: Iterable[Path]) -> None:
    """A line for each file that a job has written."""
    for path in paths:
        terminal.print(str(path), highlight=False, soft_wrap=True)

"""The folder of a run, and the console that jobs print to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from m4.experiment import Experiment


def run_folder(experiment: Experiment) -> Path:
    """Returns MODEL_DIR."""
    return Path(experiment.model_dir)


def model_folder(experiment: Experiment, dense: bool = False) -> Path:
    """Returns the folder of a model's checkpoints and decodes."""
    folder = run_folder(experiment)
    return folder / "compare" / "dense" if dense else folder


def console(stream: TextIO | None = None, columns: int = 120) -> Console:
    """Returns the console of a job, on which a name such as "[red]" is only text.

    Args:
        stream: Where to write. Defaults to standard output.
        columns: Width where there is no terminal; rich's guess of 80 is too narrow for tables.
    """
    width = None if (stream or sys.stdout).isatty() else columns
    return Console(file=stream, width=width, markup=False)


def print_files(terminal: Console, paths: Iterable[Path]) -> None:
    """A line for each file that a job has written."""
    for path in paths:
        terminal.print(str(path), highlight=False, soft_wrap=True)

"""The standard streams: closed ones, output in UTF-8, and the console for tables."""

import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from m4.settings import InputError

if TYPE_CHECKING:
    from rich.console import Console

# Names of the standard streams that were closed at the start.
closed: set[str] = set()


def open_closed() -> None:
    """Replaces closed standard streams by /dev/null, so that no file takes their place."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        closed.add(name)
        try:
            os.fstat(descriptor)
        except OSError:
            made = os.open(os.devnull, os.O_RDWR)
            if made != descriptor:
                os.dup2(made, descriptor)
                os.close(made)
        null = os.open(os.devnull, os.O_RDWR)
        setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w"))


def require_output(lost: str = "what the command prints") -> None:
    """Raises InputError if standard output is closed, so that `lost` would be lost."""
    if "stdout" in closed:
        raise InputError(f"standard output is closed: {lost} would be lost")


def utf8_output() -> None:
    """Makes standard output UTF-8 in every locale, for translations."""
    require_output("the translations")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def console(stream: TextIO | None = None) -> "Console":
    """Returns a job's console, on which a name such as "[red]" is plain text."""
    from rich.console import Console

    # Without a terminal, rich's guess of 80 columns is too narrow for tables.
    width = None if (stream or sys.stdout).isatty() else 120
    return Console(file=stream, width=width, markup=False)


def print_files(terminal: "Console", paths: Iterable[Path]) -> None:
    """Prints a line for each file that a job has written."""
    for path in paths:
        terminal.print(str(path), highlight=False, soft_wrap=True)

"""The standard streams: which the program was started without, and standard output as UTF-8."""

import io
import os
import sys

from m4.settings import InputError

# Standard streams that the program was started without.
closed: set[str] = set()


def open_closed() -> None:
    """Replaces closed standard streams by /dev/null.

    Otherwise the next file that is opened would take their place, and get what is printed.
    """
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
    """Raises InputError where standard output is closed, which would lose `lost`."""
    if "stdout" in closed:
        raise InputError(f"standard output is closed: {lost} would be lost")


def utf8_output() -> None:
    """Makes standard output UTF-8 in every locale, for translations.

    Raises:
        InputError: Standard output is closed.
    """
    require_output("the translations")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")

"""What the machine refuses a job: a full disk, a file that may not be read, a closed stream."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from m4.settings import InputError

# Not the user's mistakes, and none of m4's: the same command works when the machine allows it.
_REFUSALS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.ESTALE,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
STATUS = 1

# Standard streams that the program was started without.
closed: set[str] = set()


def refused(error: BaseException | None) -> str | None:
    """What the machine refused, in one line; None: the error is another one.

    Libraries in C++ raise their own errors with the system's words in the text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{os.strerror(error.errno)}"
        for number in _REFUSALS:
            if not isinstance(error, OSError) and os.strerror(number) in str(error):
                return f"{os.strerror(number)} ({type(error).__name__})"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def check_text(arguments: Sequence[str]) -> None:
    """InputError: an argument is not UTF-8."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise InputError(f"argument {number}, {shown!r}: not UTF-8") from error


def open_closed_streams() -> None:
    """Standard streams that are closed become /dev/null: else the next file that is opened would
    take their place, and what is printed would go there."""
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


def open_standard_output() -> None:
    """Standard output for translations: UTF-8 as the lines that are read, in every locale.

    InputError: it is closed."""
    if "stdout" in closed:
        raise InputError("standard output is closed: the translations would be lost")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def flushed(status: int, name: str) -> int:
    """The exit status of a program that has written everything to standard output; STATUS and one
    line where what is left cannot be written. name: what the line begins with."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would try it again when it ends.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if status == 0 and not isinstance(error, BrokenPipeError):  # `m4 report | head` is quiet
            print(f"{name}: standard output: {error.strerror}", file=sys.stderr)
            return STATUS
    return status

"""Errors of the machine, not of the user: a full disk, a file that may not be read."""

import contextlib
import errno
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


def refused(error: BaseException | None) -> str | None:
    """Returns in one line what the machine refused, or None for any other error.

    Libraries in C++ raise their own errors, with the system's words in the text.
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
    """Raises InputError for an argument that is not UTF-8."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise InputError(f"argument {number}, {shown!r}: not UTF-8") from error


def flushed(status: int, name: str) -> int:
    """Writes what is left to standard output, and returns the exit status of the program.

    Args:
        status: The exit status so far, returned where all could be written.
        name: The beginning of the line on standard error where it could not.
    """
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

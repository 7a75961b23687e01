"""Errors of the machine, not of the user: a full disk, a file that may not be read."""

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Sequence

from m4.settings import InputError

# Not the user's mistakes, and none of m4's: the same command works when the machine allows it.
_REFUSALS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE,
    errno.ENFILE, errno.EIO, errno.ESTALE, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR,
    errno.EISDIR, errno.ENXIO, errno.ENOMEM,
)  # fmt: skip
# Of Python and of the loader of shared libraries.
_WORDS = ("failed to map segment from shared object", "can't start new thread", "std::bad_alloc")
# Open files and memory that a job needs at most, with all its libraries, beyond its model. Systems
# allow 256 files and more; where a compiler gets no memory, it hangs or aborts.
_LEAST_FILES, _LEAST_BYTES = 256, 2 << 30
STATUS = 1


def check_limits() -> None:
    """Allows as many open files as the system does.

    Raises:
        OSError: It allows too few, or too little memory: libraries would fail at any place, in
            their threads too, or never end.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if 0 <= soft < _LEAST_FILES:
        said = f"{soft} are allowed (ulimit -n), m4 needs {_LEAST_FILES}"
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: {said}")
    for kind, flag in ((resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")):
        if 0 <= (soft := resource.getrlimit(kind)[0]) < _LEAST_BYTES:
            allowed, needed = (f"{number >> 10:,}" for number in (soft, _LEAST_BYTES))
            said = f"{allowed} KiB are allowed (ulimit -{flag}), m4 needs {needed}"
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {said}")


def refused(error: BaseException | None) -> str | None:
    """Returns in one line what the machine refused, or None for any other error.

    Libraries in C++ raise their own errors, with the system's words in the text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{os.strerror(error.errno) if where else error.strerror}"
        if isinstance(error, MemoryError):
            return os.strerror(errno.ENOMEM)
        if found := next((one for one in _WORDS if one in str(error)), None):
            return f"{found} ({type(error).__name__}): too little memory, or too many processes"
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

    It is `status` where all could be written; else a line on standard error begins with `name`.
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

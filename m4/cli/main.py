"""`m4 COMMAND ...`: reads the arguments, runs the command and returns the exit status."""

import argparse
import atexit
import contextlib
import gc
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from m4.cli import environment
from m4.cli.arguments import parse
from m4.jobs import streams
from m4.parallel.platform import signals
from m4.parallel.platform.huge_pages import restart_with_huge_pages
from m4.settings import InputError, first_line
from m4.storage.files import check_output, follow_links
from m4.storage.objects import Unreachable

_AGAIN = "what was written before is whole: the same command resumes (--debug: where it was)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    0; 1 where another process of the job was lost, another job is at work in MODEL_DIR, the machine
    refuses something (a full disk), or the last files did not get to its store; 2 for a mistake of
    the user's; 3 where another job has taken MODEL_DIR over; 130 for Ctrl-C and for training that
    saved its step; 128 and the signal's number for other signals.

    Args:
        arguments: Words after `m4`. Defaults to those of this program, which may then restart or
            end the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        streams.open_closed()
    try:
        environment.check_text(given)
        parsed = parse(given)
    except InputError as error:
        print(f"m4: {first_line(error)}", file=sys.stderr)
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow, which a source may need (Tfds), would take the whole memory of a GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if arguments is None:  # the program itself, not a call from another one
        if parsed.command == "translate":
            # Looking for garbage among what is imported takes a tenth of the time until the first
            # line; the command turns it on when the model is there.
            gc.disable()
        restart_with_huge_pages()
        signals.watch()
        if parsed.processes is not None:
            return run_together(parsed)
    status = run_alone(parsed)
    if arguments is None:
        status = environment.flushed(status, f"m4 {parsed.command}")
        if status > 128:
            # A signal: a step may be running. The interpreter's own end would take its memory away,
            # and crash.
            atexit._run_exitfuncs()
            os._exit(status)
    return status


def run_together(parsed: argparse.Namespace) -> int:
    """Runs a command as one of several processes, and ends the process where it fails."""
    from m4.parallel import distributed

    status = distributed.PEER_LOST_STATUS
    try:
        status = run_alone(parsed)
        if status == 0:
            distributed.shutdown()
    except distributed.PEER_LOST_ERRORS as error:
        status = distributed.PEER_LOST_STATUS
        said = distributed.peer_lost(error)
        if said is None:
            raise
        print(f"m4 {parsed.command}: {said}", file=sys.stderr)
    finally:
        if status != 0:
            if sys.exception() is not None:
                traceback.print_exc()
            # The interpreter's own end would wait for the others.
            distributed.abort_process(status)
    return status


def run_alone(parsed: argparse.Namespace) -> int:
    """Runs a command and returns the exit status. Errors that are not the user's are raised."""
    try:
        if getattr(parsed, "follow_links", False):
            follow_links()
        _check_outputs(parsed)
        environment.check_limits()
        return parsed.do(parsed) or 0
    except BaseException as error:
        # First of all: an import that a signal ends is an ImportError, and a config's InputError.
        if (status := signals.status_of(error)) is not None:
            said = signals.message(error)
        elif isinstance(error, BrokenPipeError):
            return 0  # `m4 translate | head`
        elif parsed.debug:
            raise
        elif isinstance(error, InputError | Unreachable):
            said, status = first_line(error), error.status
        elif (refused := environment.refused(error)) is not None:
            again = f"; {_AGAIN}" if hasattr(parsed, "multiprocess") else ""
            said, status = f"{refused}{again}", environment.STATUS
        else:
            raise
        with contextlib.suppress(OSError):  # a full disk may be this one's, too
            print(f"m4 {parsed.command}: {said}", file=sys.stderr)
        return status


def _check_outputs(parsed: argparse.Namespace) -> None:
    """Raises InputError where a command could not write the file or folder of its result."""
    for flag in ("output", "out"):
        value = getattr(parsed, flag, None)
        for one in map(str, value if isinstance(value, list) else [value]):
            # Addresses, and standard output by its names (`m4.eval.text`).
            if value is not None and not re.match(r"-$|\w+://|/dev/(std|fd/)|/proc/self/fd/", one):
                check_output(Path(one), f"--{flag}={one}")

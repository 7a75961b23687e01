"""`m4 JOB ...`: arguments -> config -> job -> exit status. Nothing heavy before a job is known."""

import argparse
import atexit
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Sequence

from m4.cli import environment
from m4.cli.arguments import distributed_options_of, parser, split_arguments
from m4.cli.job_arguments import TOGETHER
from m4.parallel.distributed_options import DistributedOptions
from m4.parallel.platform import signals
from m4.parallel.platform.huge_pages import restart_with_huge_pages
from m4.settings import InputError
from m4.storage.lease import LeaseLost
from m4.storage.store import Unreachable

_AGAIN = "what was written before is whole: the same command resumes (--debug: where it was)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job; returns the exit status.

    0; 1 where another process of the job was lost, another job is at work in MODEL_DIR, the machine
    refuses something (a full disk), or the last files did not get to its store; 2 for a mistake of
    the user's; 3 where another job has taken MODEL_DIR over; 130 for Ctrl-C and for training that
    saved its step; 128 and the signal's number for other signals.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        environment.open_closed_streams()
    try:
        environment.check_text(given)
        others, bindings = split_arguments(given)
        parsed = parser().parse_args(others)
        options = distributed_options_of(parsed, os.environ)
    except InputError as error:
        print(f"m4: {one_line(error)}", file=sys.stderr)
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow, which a source may need (Tfds), would take the whole memory of a GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if arguments is None:  # the program itself, not a call from another one
        if parsed.job == "translate":
            # Looking for garbage among what is imported takes a tenth of the time until the first
            # line; `commands` turns it on when the model is there.
            gc.disable()
        restart_with_huge_pages()
        signals.watch()
        if options is not None:
            return run_together(parsed, bindings, options)
    status = run_alone(parsed, bindings)
    if arguments is None:
        status = environment.flushed(status, f"m4 {job_name(parsed)}")
        if status == LeaseLost.status:
            os._exit(status)  # the interpreter's own end would wait for a checkpoint being written
        if status > 128:
            # A signal: a step may be running. The interpreter's own end would take its memory away,
            # and crash.
            atexit._run_exitfuncs()
            os._exit(status)
    return status


def run_together(
    parsed: argparse.Namespace, bindings: Sequence[str], options: DistributedOptions
) -> int:
    """Runs one job as one of several processes; ends the process where it fails."""
    from m4.parallel import distributed

    status = distributed.PEER_LOST_STATUS
    try:
        status = run_alone(parsed, bindings, options)
        if status == 0:
            distributed.shutdown()
    except distributed.PEER_LOST_ERRORS as error:
        status = distributed.PEER_LOST_STATUS
        said = distributed.peer_lost(error)
        if said is None:
            raise
        print(f"m4 {job_name(parsed)}: {said}", file=sys.stderr)
    finally:
        if status != 0:
            if sys.exception() is not None:
                traceback.print_exc()
            # The interpreter's own end would wait for the others.
            distributed.abort_process(status)
    return status


def run_alone(
    parsed: argparse.Namespace, bindings: Sequence[str], options: DistributedOptions | None = None
) -> int:
    """Runs one job; returns the exit status. Errors that are not the user's are raised."""
    from m4.cli import commands

    try:
        return commands.run(parsed, bindings, options)
    except InputError as error:
        if parsed.debug:
            raise
        print(f"m4 {job_name(parsed)}: {one_line(error)}", file=sys.stderr)
        return error.status
    except (LeaseLost, Unreachable) as error:
        print(f"m4 {job_name(parsed)}: {one_line(error)}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        return 0  # `m4 translate | head`
    except BaseException as error:
        said = None if parsed.debug else environment.refused(error)
        if said is not None:
            with contextlib.suppress(OSError):  # the same disk
                again = f"; {_AGAIN}" if parsed.job in TOGETHER else ""
                print(f"m4 {job_name(parsed)}: {said}{again}", file=sys.stderr)
            return environment.STATUS
        if (status := signals.status_of(error)) is None:
            raise
        print(f"m4 {job_name(parsed)}: {signals.message(error)}", file=sys.stderr)
        return status


def job_name(parsed: argparse.Namespace) -> str:
    """As typed: "train", "data audit"."""
    return " ".join([parsed.job, *([parsed.look] if parsed.job == "data" else [])])


def one_line(error: BaseException) -> str:
    """An error's message in one line: the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""Jobs in forks of one warm process: an m4 process without its ten seconds of imports.

The process that forks must not have used JAX: its threads would be missing in the child. A child is
the leader of a session, so that whatever it leaves behind is found.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORTED = (
    "orbax.checkpoint", "m4.config", "m4.eval.report.figures", "m4.eval.report.plot",
    "m4.jobs.checkpoints.average", "m4.jobs.decoding.text", "m4.jobs.bilingual",
    "m4.jobs.checkpoints.initial", "m4.jobs.decoding.report", "m4.train.multitask.cosines",
)  # fmt: skip
# A child that lasts longer counts as hanging.
MOST_SECONDS = 180.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a child.

    Attributes:
        status: Its exit status, or minus the signal; None if it had to be ended.
        orphans: Command lines of processes that it left behind.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    orphans: tuple[str, ...] = ()

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err

    @property
    def last(self) -> str:
        """Returns the last line that it printed, without a progress bar's."""
        lines = [*self.out.splitlines(), *self.err.splitlines()]
        lines = [line for line in lines if line.strip() and "] " not in line[-40:]]
        return lines[-1].strip() if lines else ""


def warm() -> None:
    """Imports the modules of jobs, without a computation."""
    for name in _IMPORTED:
        importlib.import_module(name)
    # Tracing makes many objects that stay, and there are many already.
    gc.set_threshold(50_000, 20, 20)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


def in_child(
    work: Callable[[], int],
    *,
    most_seconds: float = MOST_SECONDS,
    watch: Callable[[int, float], None] | None = None,
) -> Ended:
    """Runs `work` in a fork; its result is the exit status.

    Args:
        work: The child's work.
        most_seconds: Time after which the child is ended.
        watch: Called in the parent with the child's id and the time when it is given up; returns
            when there is nothing more to watch.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _work(work, out.fileno(), err.fileno())
        if watch is not None:
            watch(child, begin + most_seconds)
        status = _wait(child, begin + most_seconds)
        seconds = time.monotonic() - begin
        orphans = _orphans(child)
        out.seek(0)
        err.seek(0)
        said = [file.read().decode(errors="replace") for file in (out, err)]
    return Ended(status, said[0], said[1], seconds, orphans)


def _work(work: Callable[[], int], out: int, err: int) -> None:
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    status = 1
    try:
        status = work()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def _wait(child: int, until: float) -> int | None:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def _orphans(session: int) -> tuple[str, ...]:
    """Ends the rest of a session, and names processes that did not end within 5 seconds."""
    until = time.monotonic() + 5
    while left := members(session):
        if time.monotonic() > until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return tuple(left.values())
        time.sleep(0.02)
    return ()


def members(session: int) -> dict[int, str]:
    """Returns process -> command line of a session's processes that live."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
                found[int(name)] = command.decode(errors="replace").strip()
    return found


def computed(work: Callable[[], Any]) -> Any:
    """Runs work that uses JAX in a fork, and returns its result, which is JSON."""
    with tempfile.NamedTemporaryFile("r") as file:

        def write() -> int:
            Path(file.name).write_text(json.dumps(work()), encoding="utf-8")
            return 0

        ended = in_child(write)
        if ended.status != 0:
            raise RuntimeError(ended.err)
        return json.load(file)

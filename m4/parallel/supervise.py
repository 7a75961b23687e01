"""The process that waits beside one of several: it says in one line why that one ended.

Where another process of a job dies, JAX ends this one by abort(), from a thread of its own, without
any Python. So the work is done in a child, and who started it tells what became of it.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Iterator

# JAX's own lines stand above this one.
PEER_LOST = (
    "another process of the job has ended or cannot be reached, so this one ends too; started "
    "again, all of them go on from the latest checkpoint"
)
# Not 2, which is a mistake of the user's: a job that lost a process can be started again.
PEER_LOST_STATUS = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# What an abort of this process would mean, as its waiting one reads it; empty: PEER_LOST.
_abort_message = mmap.mmap(-1, 4096)


@contextlib.contextmanager
def abort_message(text: str) -> Iterator[None]:
    """Within it an abort of this process means what the text says, in one line."""
    _mean(text)
    try:
        yield
    finally:
        _mean("")


def _mean(text: str) -> None:
    content = text.encode()[: len(_abort_message) - 1]
    _abort_message[: len(content) + 1] = content + b"\0"


def supervise(name: str) -> int | None:
    """Forks: None in the child, which does the work; its exit status in the one that waits.

    To be called before anything starts threads. Signals that ask the waiting process to end go to
    the child; the child does not outlive it (on Linux).

    Args:
        name: what messages begin with.
    """
    waiting = os.getpid()
    child = os.fork()
    if child == 0:
        # A group of its own: what is typed reaches it once, through the process that waits.
        os.setpgid(0, 0)
        end_with(waiting)
        return None
    for number in _FORWARDED:
        signal.signal(number, lambda number, _frame: _send(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if -code == signal.SIGABRT:
        said = _abort_message[:].partition(b"\0")[0].decode(errors="replace")
        print(f"{name}: {said or PEER_LOST}", file=sys.stderr)
        return PEER_LOST_STATUS
    more = " (out of memory?)" if -code == signal.SIGKILL else ""
    print(f"{name}: ended by {signal.Signals(-code).name}{more}", file=sys.stderr)
    return 128 - code


def end_with(parent: int) -> None:
    """Has this process killed when its parent, process `parent`, ends, however that ends; only
    Linux can. It ends at once where the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before this was asked for
            os._exit(PEER_LOST_STATUS)


def _send(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(child, number)

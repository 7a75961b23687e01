"""The parent of one of several processes: it reports in one line why that one ended.

Where another process of a job dies, JAX ends this one by abort(), from a thread without Python. So
the work is done in a child, whose parent reports how it ended.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from m4.parallel.platform import signals

# JAX's own lines stand above this one.
PEER_LOST = (
    "another process of the job has ended or cannot be reached, so this one ends too; start all of "
    "them again: training resumes from the latest checkpoint"
)
# Not 2, which is a user's mistake: a job that lost a process can be started again.
PEER_LOST_STATUS = 1
_PR_SET_PDEATHSIG = 1
# What the parent reports if this process aborts; empty: PEER_LOST.
_abort_message = mmap.mmap(-1, 4096)


@contextlib.contextmanager
def abort_message(text: str) -> Iterator[None]:
    """Within it the parent reports an abort of this process with this text, in one line."""
    _mean(text)
    try:
        yield
    finally:
        _mean("")


def _mean(text: str) -> None:
    content = text.encode()[: len(_abort_message) - 1]
    _abort_message[: len(content) + 1] = content + b"\0"


def supervise(name: str) -> int | None:
    """Forks: None in the child, which does the work; the child's exit status in the parent.

    To be called before anything starts threads. Signals that ask the parent to end go to the
    child; the child does not outlive the parent.

    Args:
        name: what messages begin with.
    """
    parent = os.getpid()
    # Neither the child's handlers nor the parent's are there right after the fork.
    with signals.blocked():
        child = os.fork()
        if child == 0:
            # A separate group: Ctrl-C reaches it once, through the parent.
            os.setpgid(0, 0)
            end_with(parent)
            return None
        for number in signals.NUMBERS:
            signal.signal(number, lambda number, _frame: _send(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if -code == signal.SIGABRT:
        text = _abort_message[:].partition(b"\0")[0].decode(errors="replace")
        print(f"{name}: {text or PEER_LOST}", file=sys.stderr)
        return PEER_LOST_STATUS
    more = " (out of memory?)" if -code == signal.SIGKILL else ""
    print(f"{name}: ended by {signal.Signals(-code).name}{more}", file=sys.stderr)
    return 128 - code


def end_with(parent: int) -> None:
    """Has this process killed when its parent, process `parent`, ends, however that ends.

    On Linux the kernel does it, elsewhere a thread that looks every second. It ends at once where
    the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_poll, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent had ended before this call
        os._exit(PEER_LOST_STATUS)


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(PEER_LOST_STATUS)


def _send(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(child, number)

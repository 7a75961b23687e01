"""Copies a job's log to its run folder in a bucket, so that the log outlives the machine.

    python -m m4.storage.log_upload LOG ADDRESS PID

It is a process next to the job's: what a crashed one wrote last, its traceback, is copied too.
"""

import os
import sys
import time
from pathlib import Path

from m4.storage.store import ERRORS, Store, one_line, open_store

_PERIOD_SECONDS = 60.0
_TRIES = 3
_LONGEST_BYTES = 64 << 20


def follow(log: Path, address: str, pid: int, period_seconds: float = _PERIOD_SECONDS) -> None:
    """Copies the log to `address` every period while process `pid` lives, and when it has ended.

    Of a log longer than 64 MiB only the end. Failures are printed, each once in a row.
    """
    folder, _, name = address.rpartition("/")
    store: Store | None = None
    copied, failure, tries = b"", "", _TRIES
    while tries:
        ended = not _alive(pid)
        text = _end(log)
        try:
            if text != copied:
                store = store or open_store(folder)
                store.write(name, text)
            copied, failure = text, ""
        except ERRORS as error:
            if failure != (failure := one_line(error)):
                print(f"{address}: the log is not copied, will retry ({failure})", file=sys.stderr)
        if not ended:
            _wait(pid, period_seconds)
        elif not failure:
            return
        else:
            tries -= 1
            time.sleep(period_seconds / _TRIES)


def _end(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LONGEST_BYTES))
        return file.read()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(pid: int, seconds: float) -> None:
    """Sleeps, but not after the end of the process."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and _alive(pid):
        time.sleep(min(1.0, seconds))


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

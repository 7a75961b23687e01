"""Copies a job's log to its run folder in a bucket, so that the log outlives the machine.

    python scripts/copy_log.py LOG ADDRESS PID

It is a process next to the job's: what a crashed one wrote last, its traceback, is copied, too.
"""

import os
import sys
import time
from pathlib import Path

from m4.storage.objects import ERRORS, Objects, one_line

_LONGEST_BYTES = 64 << 20


def follow(log: Path, address: str, pid: int, period_seconds: float = 60.0) -> None:
    """Copies the log to `address` every period while process `pid` lives, and when it has ended.

    Of a log longer than 64 MiB only the end is copied. A failure is printed, once in a row.
    """
    folder, _, name = address.rpartition("/")
    objects = Objects(folder)
    copied, failure, tries = b"", "", 3
    while tries:
        ended, text = not _alive(pid), _end(log)
        try:
            if text != copied:
                objects.put(name, text)
            copied, failure = text, ""
        except ERRORS as error:
            if failure != (failure := one_line(error)):
                print(f"{address}: the log is not copied, will retry ({failure})", file=sys.stderr)
        if ended and not failure:
            return
        tries -= ended
        until = time.monotonic() + (period_seconds / 3 if ended else period_seconds)
        while time.monotonic() < until and (ended or _alive(pid)):
            time.sleep(min(1.0, period_seconds))


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


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

"""Locks, by which one job at a time writes files of a kind in a folder or bucket."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from m4.settings import InputError
from m4.storage.objects import ERRORS, Changed, Objects, Version, one_line

RUNNING = ".running"
PERIOD_SECONDS = 30.0
# Periods without renewal after which a lock in a bucket has expired.
EXPIRED_PERIODS = 3
# Exit status of a job whose lock another job has taken over.
LOST_STATUS = 3
# Seconds to wait, as a job that starts holds other locks for a moment.
_WAIT_SECONDS = 0.5


class Busy(InputError):
    """The error that another job is at work there, which is no mistake of the user."""

    status = 1


@contextlib.contextmanager
def local_lock(path: Path, where: str, seconds: float = _WAIT_SECONDS) -> Iterator[None]:
    """Holds a lock among this machine's processes; refuses a link, which may lead elsewhere.

    Args:
        where: Setting and its value, for messages.
        seconds: Time to wait for the lock; -1 waits without limit.

    Raises:
        Busy: Another process holds the lock.
        InputError: The file cannot be made.
    """
    lock = FileLock(path, timeout=seconds)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise Busy(f"{where}: another m4 job is at work there") from error
    except OSError as error:
        raise InputError(f"{where}: cannot be made or written ({error})") from error
    try:
        yield
    finally:
        lock.release()


class BucketLock:
    """A job's lock in a bucket: the object `.running/<kind>.json`, which the job renews.

    A lock has expired if a waiting job sees no renewal for EXPIRED_PERIODS; that job then replaces
    the version that it saw. Thus one of two simultaneous jobs wins, and no clocks are compared. A
    job that lost its lock sees the other job's before it writes anything again, and ends.
    """

    def __init__(
        self, objects: Objects, kind: str, copy: str, where: str, lost: Callable[[str], Any]
    ) -> None:
        """Prepares the lock, without a request.

        Args:
            kind: Kind of files that the job writes.
            copy: Name of the local copy, whose local lock this process holds, so that a lock in the
                bucket that names the same copy is a dead process's.
            where: Setting and its value, for messages.
            lost: Function that ends the process, called with a sentence if the lock is taken over.
        """
        self._objects, self._where, self._lost = objects, where, lost
        self._name = f"{RUNNING}/{kind}.json"
        self._mark = {"job": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._mark["copy"] = copy
        self._version: Version | None = None
        self._renewed = -float("inf")
        self._alone = threading.Lock()

    def acquire(self, *, wait: bool = True) -> None:
        """Takes the lock; with `wait`, waits until a dead job's lock expires.

        Raises:
            Busy: Another job holds and renews it.
        """
        seen, since = None, 0.0
        while not self._write():
            version, mark = self._found()
            if version is None or any(mark.get(k) == self._mark[k] for k in ("job", "copy")):
                self._version = version  # it is gone, or this job's write was not answered
            elif not wait or seen not in (None, version):
                raise Busy(f"{self._where}: another m4 job is at work there ({_who(mark)})")
            elif seen is None:
                said = f"{_who(mark)} was at work there; waiting to see whether it still runs"
                print(f"{self._where}: {said}", file=sys.stderr)
                seen, since = version, time.monotonic()
            elif time.monotonic() - since > EXPIRED_PERIODS * PERIOD_SECONDS:
                self._version = version
            else:
                time.sleep(PERIOD_SECONDS / 5)
        # Overwriting and reading an object need other rights than creating it.
        self.check()
        self._found()

    def _write(self) -> bool:
        """Replaces the known version of the lock; returns whether it still existed."""
        began = time.monotonic()
        try:
            content = json.dumps(self._mark).encode()
            self._version = self._objects.put_if(self._name, content, self._version)
        except Changed:
            return False
        self._renewed = began
        return True

    def check(self, older_than_seconds: float = 0.0) -> None:
        """Renews the lock if its last renewal is older: before every write, and periodically.

        If another job has taken over the lock, this one ends.
        """
        with self._alone:
            if time.monotonic() - self._renewed < older_than_seconds:
                return
            while not self._write():
                version, mark = self._found()
                if mark.get("job") != self._mark["job"]:
                    self._lost(
                        f"{self._where}: another job has taken it over "
                        f"({_who(mark) if mark else f'its {self._name} is gone'}); this one ends"
                    )
                self._version = version

    def release(self) -> None:
        """Releases the lock. If the bucket cannot be reached, a line says that it will expire."""
        if self._version is None:
            return
        try:
            self.check()  # nobody takes over a newly renewed lock
            self._objects.delete(self._name)
        except ERRORS as error:
            print(f"{self._where}: {self._name} stays ({one_line(error)})", file=sys.stderr)

    def _found(self) -> tuple[Version | None, dict[str, Any]]:
        """Returns the version and owner of the lock in the bucket; {} if it is not m4's."""
        found = self._objects.get_version(self._name)
        if found is None:
            return None, {}
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(mark := json.loads(found[0]), dict):
                return found[1], mark
        return found[1], {}


def _who(mark: dict[str, Any]) -> str:
    return f"{mark.get('host')}, process {mark.get('pid')}"

"""A lease: of the jobs that write the same files of a folder in a store, one works at a time.

It is one object, `.running/<kind>.json`: written only while there is none, renewed every
PERIOD_SECONDS, removed at the end. One that was not renewed for SILENT_PERIODS, by the store's
clock, has expired: another job writes its own over it, if it still is the one that it has seen.
So of two that come at once one wins. An expired job that lives after all finds another's lease
before it writes anything again, and ends.

What no store can give: a write that is on its way at that very moment still arrives, unless the
other job has written that object already (`Store.write` with a version).
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.settings import InputError
from m4.storage.store import ABSENT, ERRORS, Changed, Object, Store, Unreachable, one_line

RUNNING = ".running"
PERIOD_SECONDS = 30.0
SILENT_PERIODS = 3
# The lease's own thread sends it to the main thread when the lease is lost. `interrupt_when_lost`
# raises LeaseLost from it, also out of a call that waits; the training loop stops after its step.
LEASE_LOST_SIGNAL = signal.SIGUSR2


class Busy(InputError):
    """Another job is at work there. No mistake to correct: it may be about to end."""

    status = 1


class LeaseLost(BaseException):
    """Another job has taken this one's folder over.

    No Exception: it comes at any moment, from a signal, and `except Exception` must not catch it.
    """

    status = 3


class UploadFailed(Unreachable):
    """The last files of a job could not be uploaded to the store."""


class Lease:
    """This job's claim to the files of one kind in a folder.

    Args:
        kind: of the files. copy: the working copy's name, where this process holds the copy's lock
            of that kind: what a process of this machine left there has expired.
        here: where the working copy is. where: the setting and its value. Both for messages.
    """

    def __init__(self, store: Store, kind: str, copy: str, here: Path, where: str) -> None:
        self._store, self._here, self._where = store, here, where
        self._name = f"{RUNNING}/{kind}.json"
        about = {"host": socket.gethostname(), "copy": copy}
        self._mark = {"job": uuid.uuid4().hex, "pid": os.getpid(), **about}
        self._version = ABSENT
        self._busy = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_periodically, daemon=True)
        self._renewed = -float("inf")
        self.lost: LeaseLost | None = None

    def acquire(self, *, wait: bool = True) -> None:
        """Takes the lease; waits, if asked to, for another job's to expire.

        Raises:
            Busy: another job renews it.
        """
        seen = None
        while (now := self._try()) is not None:
            there, mark = self._found()
            if there is None or mark["job"] == self._mark["job"]:  # gone, or the answer was lost
                self._version = there.version if there else ABSENT
                continue
            of_this_copy = all(mark[name] == self._mark[name] for name in ("host", "copy"))
            silent = now - there.updated > SILENT_PERIODS * PERIOD_SECONDS
            if mark["job"] is None or of_this_copy or silent:
                self._version = there.version
                continue
            who = f"{mark['host']}, process {mark['pid']}"
            if not wait or seen not in (None, there.version):
                raise Busy(f"{self._where}: another m4 job is at work there ({who})")
            if seen is None:
                _warn(f"{self._where}: {who} was at work there; waiting whether it still is")
            seen = there.version
            time.sleep(PERIOD_SECONDS)
        # To write over it and to read it are other rights than to create it.
        self.check()
        self._found()
        self._thread.start()

    def _try(self) -> float | None:
        """Writes the lease, if it is of the known version; else the time by the store's clock."""
        began = time.monotonic()
        try:
            content = json.dumps(self._mark).encode()
            self._version = self._store.write(self._name, content, self._version)
        except Changed as error:
            return error.now
        self._renewed = began
        return None

    def check(self, older_than_seconds: float = 0.0) -> None:
        """Renews the lease: before this job writes to the store, and every period.

        Args:
            older_than_seconds: a renewal that is younger is good enough.

        Raises:
            LeaseLost: it is another job's by now.
        """
        with self._busy:
            if self.lost is None and time.monotonic() - self._renewed >= older_than_seconds:
                while self.lost is None and self._try() is not None:
                    self._check_owner()
            if self.lost is not None:
                raise self.lost

    def _check_owner(self) -> None:
        """Takes over the version that is there, if the answer to an own write was lost; else the
        lease is lost."""
        there, mark = self._found()
        if there is not None and mark["job"] == self._mark["job"]:
            self._version = there.version
            return
        to = (
            f"{mark['host']}, process {mark['pid']}"
            if mark["host"]
            else f"its {self._name} is gone"
        )
        self.lost = LeaseLost(
            f"{self._where}: another job has taken it over ({to}); this one ends, and what it did "
            f"since is in {self._here} alone, until a job on this machine replaces it"
        )

    def release(self) -> None:
        """Gives the lease back. A store that cannot be reached is a warning: the lease expires."""
        self._released.set()
        started = self._thread.ident is not None
        if started:
            self._thread.join()
        if self._renewed < 0 or self.lost is not None:
            return
        try:
            with contextlib.suppress(Changed):  # another job's
                self._store.delete(self._name, self._version)
        except ERRORS as error:
            if started:  # else `acquire` has said what is wrong
                _warn(f"{self._where}: {self._name} stays ({one_line(error)})")

    def _renew_periodically(self) -> None:
        while not self._released.wait(PERIOD_SECONDS):
            try:
                self.check()
            except LeaseLost:
                signal.pthread_kill(threading.main_thread().ident or 0, LEASE_LOST_SIGNAL)
                return
            except ERRORS as error:
                # The job continues: it may be over in a moment, and every write is checked.
                _warn(f"{self._where}: not reached ({one_line(error)})")

    def _found(self) -> tuple[Object | None, Mapping[str, Any]]:
        """The lease in the store, and whose it is: None where m4 did not write it."""
        there, mark = self._store.stat(self._name), dict.fromkeys(self._mark)
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            mark |= json.loads(self._store.read(self._name) or b"{}")
        return there, mark


@contextlib.contextmanager
def interrupt_when_lost(leases: Sequence[Lease]) -> Iterator[None]:
    """Within it LEASE_LOST_SIGNAL raises `LeaseLost` in the main thread. The training loop replaces
    the handler by one that stops after the current step."""

    def interrupt(number: int, frame: object) -> None:
        if lost := first_lost(leases):
            raise lost
        if callable(before):  # of a lease around this one
            before(number, frame)  # type: ignore[arg-type]

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(LEASE_LOST_SIGNAL, interrupt)
    try:
        yield
    finally:
        signal.signal(LEASE_LOST_SIGNAL, before)


def first_lost(leases: Sequence[Lease]) -> LeaseLost | None:
    """How the first of these that is lost was lost."""
    return next((one.lost for one in leases if one.lost is not None), None)


def _warn(text: str) -> None:
    print(text, file=sys.stderr)

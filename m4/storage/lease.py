"""A lease: one job at a time in a folder of an object store, which has no locks.

etils.epath cannot write "only if absent", so no job writes another's file: each has a separate one
in `.running/`, writes it first and then looks for others. Of two that come at once at least one
sees the other, and it waits. A job renews its file every PERIOD_SECONDS. One whose file stays the
same for SILENT_PERIODS has expired: the job that waited removes the file and takes the lease with a
higher number. If the expired job lives after all, it finds its file gone, or a higher number,
before it writes anything again, and ends.

What an object store cannot give: a write that is on its way at that very moment still arrives.

Errors of a store's client are caught as `Exception`, here and in `m4.storage.remote`, because they
have no narrower base: TensorFlow's OpError, with which etils.epath reaches gs://, is no OSError,
nor are gcsfs's HttpError, aiohttp's ClientError, google.auth's GoogleAuthError and botocore's
BotoCoreError, which come through fsspec; which of them there are depends on what is installed.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m4.settings import InputError
from m4.storage.files import whole

if TYPE_CHECKING:
    from etils import epath

RUNNING = ".running"
PERIOD_SECONDS = 30.0
SILENT_PERIODS = 3
# The lease's own thread sends it to the main thread when the lease is lost. `interrupt_when_lost`
# raises LeaseLost from it, also out of a call that waits; the training loop stops after its step.
LEASE_LOST_SIGNAL = signal.SIGUSR2


class LeaseLost(BaseException):
    """Another job has taken this one's folder over.

    No Exception: it comes at any moment, from a signal, and `except Exception` must not catch it.
    """

    status = 3


class UploadFailed(Exception):
    """The last files of a job could not be uploaded to the store."""

    status = 1


class Lease:
    """This job's claim to a folder in a store.

    Args:
        folder: in the store. copy: the working copy's name, where this process holds the copy's
            lock: leases that other processes took from it have expired. None: it has none.
        here: where the working copy is, for messages.
    """

    def __init__(self, folder: "epath.Path", copy: str | None, here: Path) -> None:
        self._folder, self._marks, self._here = folder, folder / RUNNING, here
        self._name = f"{uuid.uuid4().hex}.json"
        self._mark: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "copy": copy,
            "working": False,
            "number": 0,
            "renewed": 0,
        }
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_periodically, daemon=True)
        self._checked = -float("inf")
        self.lost: LeaseLost | None = None

    def acquire(self) -> None:
        """Takes the lease; waits for other jobs' to expire.

        Raises:
            ValueError: another job renews its own.
        """
        try:
            self._write()
            number = self._wait_until_expired()
            self._write(working=True, number=number + 1)
            # This process may have slept since it looked, and its lease have expired meanwhile.
            for other in self._others().values():
                if other["working"]:
                    raise self._refused(other)
        except BaseException:
            with contextlib.suppress(Exception):  # a store's; the first error is the one to raise
                self._remove_mark()
            raise
        self._checked = time.monotonic()
        self._thread.start()

    def check(self, older_than_seconds: float = 0.0) -> None:
        """Checks in the store, before this job writes there, that it still has the lease.

        Args:
            older_than_seconds: a check that is younger is good enough.

        Raises:
            LeaseLost: it has not, nor will it again.
        """
        if self.lost is None and time.monotonic() - self._checked >= older_than_seconds:
            began = time.monotonic()
            marks = self._read()
            gone = marks.pop(self._name, None) is None
            for other in marks.values():
                if other["working"] and other["number"] > self._mark["number"]:
                    self._lose(f"{other['host']}, process {other['pid']}")
            if gone and self.lost is None:
                self._lose(f"this one's file in {self._marks} is gone")
            self._checked = began
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        """Gives the lease back. A store that cannot be reached is a warning: the lease expires."""
        self._released.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self._remove_mark()
        except Exception as error:  # noqa: BLE001 (a store's: see the module)
            print(f"MODEL_DIR = {self._folder}: {self._marks} stays ({error})", file=sys.stderr)

    def _wait_until_expired(self) -> int:
        """Waits until there are no others; returns the highest number that was seen."""
        # Name -> its content, and how often it was the same since. Looks and not seconds are
        # counted: this process may have slept, and the other one with it.
        seen: dict[str, tuple[Mapping[str, Any], int]] = {}
        number = 0
        reported = False
        while True:
            others = self._others()
            for name, other in [*others.items()]:
                number = max(number, other["number"])
                before, looks = seen.get(name, (other, -1))
                same = looks + 1 if other == before else 0
                seen[name] = (other, same)
                if same >= SILENT_PERIODS or self._is_of_this_copy(other):
                    (self._marks / name).unlink(missing_ok=True)
                    del others[name]
                # Of two that only ask, both see the other: one name is the smaller one.
                elif other != before and (other["working"] or name < self._name):
                    raise self._refused(other)
            if not others:
                return number
            if not reported:
                reported = True
                (first, *_) = others.values()
                print(
                    f"MODEL_DIR = {self._folder}: {first['host']} was at work there; waiting "
                    "whether it still is",
                    file=sys.stderr,
                )
            time.sleep(PERIOD_SECONDS)
            self._renew()

    def _is_of_this_copy(self, other: Mapping[str, Any]) -> bool:
        same = all(other[name] == self._mark[name] for name in ("host", "copy"))
        return same and other["copy"] is not None

    def _refused(self, other: Mapping[str, Any]) -> InputError:
        return InputError(
            f"MODEL_DIR = {self._folder}: another m4 job is at work there ({other['host']}, "
            f"process {other['pid']})"
        )

    def _lose(self, to: str) -> None:
        self.lost = LeaseLost(
            f"MODEL_DIR = {self._folder}: another job has taken it over ({to}); this one ends, and "
            f"what it did since is in {self._here} alone, until a job on this machine replaces it"
        )
        with contextlib.suppress(Exception):  # a store's; then the lease expires
            self._remove_mark()

    def _renew_periodically(self) -> None:
        while not self._released.wait(PERIOD_SECONDS):
            try:
                self.check()
                self._renew()
            except LeaseLost:
                signal.pthread_kill(threading.main_thread().ident or 0, LEASE_LOST_SIGNAL)
                return
            except Exception as error:  # noqa: BLE001 (a store's: see the module)
                # The job continues: it may be over in a moment, and every write is checked.
                print(f"MODEL_DIR = {self._folder}: not reached ({error})", file=sys.stderr)

    # ------------------------------------------------------------------------- the store's files

    def _renew(self) -> None:
        self._write(renewed=self._mark["renewed"] + 1)

    def _write(self, **changes: Any) -> None:
        self._mark |= changes
        self._marks.mkdir(parents=True, exist_ok=True)
        with atomic_upload(self._marks / self._name) as part:
            part.write_text(json.dumps({**self._mark, "time": time.time()}))

    def _remove_mark(self) -> None:
        (self._marks / self._name).unlink(missing_ok=True)

    def _others(self) -> dict[str, Mapping[str, Any]]:
        return {name: mark for name, mark in self._read().items() if name != self._name}

    def _read(self) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        if not self._marks.exists():
            return found
        for path in self._marks.iterdir():
            if path.name.startswith(".") or path.suffix != ".json":
                continue  # unfinished, or a store's sign for a folder
            try:
                found[path.name] = json.loads(path.read_text())
            except Exception:  # a store's: see the module
                if path.exists():  # else it was removed meanwhile
                    raise
        return found


@contextlib.contextmanager
def interrupt_when_lost(lease: Lease) -> Iterator[None]:
    """Within it LEASE_LOST_SIGNAL raises `LeaseLost` in the main thread. The training loop replaces
    the handler by one that stops after the current step."""

    def interrupt(_number: int, _frame: object) -> None:
        assert lease.lost is not None
        raise lease.lost

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(LEASE_LOST_SIGNAL, interrupt)
    try:
        yield
    finally:
        signal.signal(LEASE_LOST_SIGNAL, before)


@contextlib.contextmanager
def atomic_upload(target: "epath.Path") -> Iterator["epath.Path"]:
    """A name to write to that becomes `target` whole. A store shows an object once it is."""
    if "://" in os.fspath(target):
        yield target
    else:
        with whole(Path(target)) as part:
            yield type(target)(part)

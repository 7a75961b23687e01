"""One job at a time in a folder of an object store, which has no locks.

etils.epath cannot write "only if nobody else has", so nobody writes what is another's: each job
has a file of its own in `.running/`, writes it first and looks for others then. Of two that come at
once at least one sees the other, and it waits. A job at work renews its file every PERIOD_SECONDS;
one whose file stays the same for SILENT_PERIODS is dead, and who waited removes its file and goes
on with a higher number. Should it live after all, it finds its file gone, or a higher number,
before it writes anything again, and ends.

What an object store cannot give: a write that is on its way at that very moment still arrives.

Where a store is asked, here and in `m4.storage.remote`, `Exception` is caught and nothing narrower.
What its client raises has no other base: TensorFlow's OpError, with which etils.epath reaches
gs://, is no OSError, nor are gcsfs's HttpError, aiohttp's ClientError, google.auth's
GoogleAuthError and botocore's BotoCoreError, which come through fsspec; which of them there are
depends on what is installed.
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

from m4.storage.files import whole

if TYPE_CHECKING:
    from etils import epath

RUNNING = ".running"
PERIOD_SECONDS = 30.0
SILENT_PERIODS = 3
# Sent to the main thread of a job that has lost its folder; it wakes a call that waits.
LEASE_LOST_SIGNAL = signal.SIGUSR2


class LeaseLost(BaseException):
    """Another job has taken this one's folder over.

    No Exception: it comes at any moment, from a signal, and nobody else should take it for theirs.
    """

    status = 3


class UploadFailed(Exception):
    """The last files of a job could not be taken to the store."""

    status = 1


class Lease:
    """This job's claim to a folder in a store.

    Args:
        folder: in the store. copy: the working copy's own name, where this process holds its lock:
            what another process has said from it says nothing any more. None: it has none.
        here: where the working copy is, for messages.
    """

    def __init__(self, folder: "epath.Path", copy: str | None, here: Path) -> None:
        self._folder, self._marks, self._here = folder, folder / RUNNING, here
        self._name = f"{uuid.uuid4().hex}.json"
        self._said: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "copy": copy,
            "working": False,
            "number": 0,
            "renewed": 0,
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._looked = -float("inf")
        self.lost: LeaseLost | None = None

    def acquire(self) -> None:
        """Says in the store that this job is at work; waits for others that may be dead.

        Raises:
            ValueError: one of them is alive.
        """
        try:
            self._say()
            number = self._wait_until_expired()
            self._say(working=True, number=number + 1)
            # This process may have slept since it looked, and been taken for dead.
            for other in self._others().values():
                if other["working"]:
                    raise self._refused(other)
        except BaseException:
            with contextlib.suppress(Exception):  # a store's; the first error is the one to tell
                self._remove_mark()
            raise
        self._looked = time.monotonic()
        self._thread.start()

    def check(self, older_than_seconds: float = 0.0) -> None:
        """Looks in the store whether this job still has the folder; before it writes there.

        older_than_seconds: a look that is younger is good enough.

        Raises:
            LeaseLost: it has not, nor will it again.
        """
        if self.lost is None:
            if time.monotonic() - self._looked < older_than_seconds:
                return
            began = time.monotonic()
            marks = self._read()
            gone = marks.pop(self._name, None) is None
            for other in marks.values():
                if other["working"] and other["number"] > self._said["number"]:
                    self._lose(f"{other['host']}, process {other['pid']}")
            if gone and self.lost is None:
                self._lose(f"this one's file in {self._marks} is gone")
            self._looked = began
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        """Takes back that this job is at work; a store that cannot be reached is told, no error."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self._remove_mark()
        except Exception as error:  # noqa: BLE001 (a store's: see the module)
            print(f"MODEL_DIR = {self._folder}: {self._marks} stays ({error})", file=sys.stderr)

    def _wait_until_expired(self) -> int:
        """Waits until there are no others; the highest number that was seen."""
        # Name -> what it said, and how often it was the same since. Looks and not seconds are
        # counted: this process may have slept, and the other one with it.
        seen: dict[str, tuple[Mapping[str, Any], int]] = {}
        number = 0
        told = False
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
            if not told:
                told = True
                (first, *_) = others.values()
                print(
                    f"MODEL_DIR = {self._folder}: {first['host']} was at work there; waiting "
                    "whether it still is",
                    file=sys.stderr,
                )
            time.sleep(PERIOD_SECONDS)
            self._say()

    def _is_of_this_copy(self, other: Mapping[str, Any]) -> bool:
        return other["copy"] is not None and all(
            other[name] == self._said[name] for name in ("host", "copy")
        )

    def _refused(self, other: Mapping[str, Any]) -> ValueError:
        return ValueError(
            f"MODEL_DIR = {self._folder}: another m4 job is at work there ({other['host']}, "
            f"process {other['pid']})"
        )

    def _lose(self, to: str) -> None:
        self.lost = LeaseLost(
            f"MODEL_DIR = {self._folder}: another job has taken it over ({to}); this one ends, and "
            f"what it did since is in {self._here} alone, until a job on this machine replaces it"
        )
        with contextlib.suppress(Exception):  # a store's; who comes later waits it out
            self._remove_mark()

    def _follow(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            try:
                self.check()
                self._say(renewed=self._said["renewed"] + 1)
            except LeaseLost:
                signal.pthread_kill(threading.main_thread().ident or 0, LEASE_LOST_SIGNAL)
                return
            except Exception as error:  # noqa: BLE001 (a store's: see the module)
                # The job goes on: it may be over in a moment, and before every write it looks.
                print(f"MODEL_DIR = {self._folder}: not reached ({error})", file=sys.stderr)

    # ------------------------------------------------------------------------- the store's files

    def _say(self, **changes: Any) -> None:
        self._said |= changes if changes else {"renewed": self._said["renewed"] + 1}
        self._marks.mkdir(parents=True, exist_ok=True)
        with atomic_upload(self._marks / self._name) as part:
            part.write_text(json.dumps({**self._said, "time": time.time()}))

    def _remove_mark(self) -> None:
        (self._marks / self._name).unlink(missing_ok=True)

    def _others(self) -> dict[str, Mapping[str, Any]]:
        return {name: said for name, said in self._read().items() if name != self._name}

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
                if path.exists():  # else it was withdrawn meanwhile
                    raise
        return found


@contextlib.contextmanager
def interrupt_when_lost(lease: Lease) -> Iterator[None]:
    """Within it LEASE_LOST_SIGNAL raises `LeaseLost` in the main thread. The training loop replaces
    the handler by one that stops after the current step."""

    def lost(_number: int, _frame: object) -> None:
        assert lease.lost is not None
        raise lease.lost

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(LEASE_LOST_SIGNAL, lost)
    try:
        yield
    finally:
        signal.signal(LEASE_LOST_SIGNAL, before)


@contextlib.contextmanager
def atomic_upload(target: "epath.Path") -> Iterator["epath.Path"]:
    """A name to write to that becomes `target` whole. An object in a store is seen when it is."""
    if "://" in os.fspath(target):
        yield target
    else:
        with whole(Path(target)) as part:
            yield type(target)(part)

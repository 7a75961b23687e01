"""A working copy: the local folder of a job whose folder is in a store (`m4.storage.remote`)."""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from m4.parallel.platform import signals
from m4.settings import InputError
from m4.storage import lease
from m4.storage.files import confined, open_lock, read_json, write_text
from m4.storage.store import ABSENT, ERRORS, Changed, one_line, open_store

MARK = ".remote"
COMPILED = "compilation_cache"
_RECORD = ".remote.json"
# In the store alone; a corpus (data) has a separate working copy.
_NOT_COPIED = {"checkpoints", "data", "logs"}
# For so many periods a push that the job waits for is repeated.
_RETRY_PERIODS = 10
_THREADS = 8
# Of files in a folder whose files are all of one kind.
KIND = "files"

# Relative path -> [bytes, time here in ns, version there].
_Record = dict[str, list[int | str]]

# Those within whose `leased` this process is.
open_copies: list["WorkingCopy"] = []


def mark_of(folder: Path) -> tuple[str, str]:
    """The address that a folder is a working copy of, and the copy's own name."""
    lines = (folder / MARK).read_text(encoding="utf-8").splitlines()
    if len(lines) != 2:
        raise InputError(f"{folder}/{MARK}: must have two lines, an address and a name")
    return lines[0], lines[1]


def not_compiled(name: str) -> bool:
    """Whether a file is no compiled program: those are run, so only whoever writes a folder reads
    them."""
    return COMPILED not in name.split("/")


def locked_kinds(folder: Path) -> set[str]:
    """The kinds that jobs of this machine write in a folder at this moment."""
    found = set()
    for path in folder.glob(".lock.*"):
        with open_lock(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.add(path.suffix[1:])
    return found


class WorkingCopy:
    """A working copy and what it is a copy of; files of these kinds it may write there."""

    def __init__(
        self,
        folder: Path,
        where: str = "",
        kinds: Collection[str] = (),
        kind_of: Callable[[str], str] = lambda name: KIND,
    ) -> None:
        address, copy = mark_of(folder)
        self.here, self.there, self._where = folder, open_store(address), where
        self._kinds, self._kind_of = kinds, kind_of
        self.leases = [lease.Lease(self.there, kind, copy, folder, where) for kind in kinds]

    @contextlib.contextmanager
    def leased(self, *, wait: bool) -> Iterator[None]:
        """Within it the leases are this process's and the store follows the copy."""
        with lease.interrupt_when_lost(self.leases), contextlib.ExitStack() as stack:
            for one in self.leases:
                stack.callback(one.release)
            try:
                for one in self.leases:
                    one.acquire(wait=wait)
                self.pull(lambda name: self._is_own(name) or not_compiled(name))
                with self._pushed():
                    yield
            except BaseException as error:
                if (lost := lease.first_lost(self.leases)) is not None:
                    self._discard()
                    if error is not lost:
                        raise lost from error
                raise

    @contextlib.contextmanager
    def _pushed(self) -> Iterator[None]:
        """Within it changes are uploaded every PERIOD_SECONDS, and at the end."""
        ended = threading.Event()
        thread = threading.Thread(target=self._push_periodically, args=(ended,), daemon=True)
        open_copies.append(self)
        thread.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            ended.set()
            thread.join()
            try:
                with signals.held():
                    self.push_with_retries()
            except ERRORS as error:
                said = (
                    f"{self._where}: the job's last files could not be uploaded "
                    f"({one_line(error)}); they are in {self.here}, and the same command on this "
                    "machine uploads them"
                )
                if not failed:
                    raise lease.UploadFailed(said) from error
                print(said, file=sys.stderr)  # the job's own error is raised
            finally:
                open_copies.remove(self)

    def pull(self, wanted: Callable[[str], bool]) -> None:
        """Makes the copy equal to the store; files that both have alike stay."""
        with self._record() as record:
            # A job of this machine keeps its files up to date, and has some of them open.
            others = locked_kinds(self.here) - {*self._kinds}

            def taken(name: str) -> bool:
                return _copied(name) and wanted(name) and self._kind_of(name) not in others

            listed = self.there.list(_NOT_COPIED)
            there = {name: found.version for name, found in listed.items() if taken(name)}

            def get(name: str) -> None:
                target = confined(self.here, name)
                known = record.get(name)
                # The same there as when it was copied. If it is another one here, a job was killed
                # before it could upload it: the newer one stays.
                if known is None or known[-1] != there[name] or not target.exists():
                    # A cache of programs that others could write to is not used.
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self.there.download(name, target)
                    record[name] = [*(_state(target) or ()), there[name]]

            _in_threads(get, there)
            for name in [name for name in record if taken(name) and name not in there]:
                confined(self.here, name).unlink(missing_ok=True)
                del record[name]

    def push(self) -> None:
        """Makes the store's files of this job's kinds equal to the copy's. LeaseLost."""
        self._check()
        with self._record() as record:
            names = self._names()

            def put(name: str) -> None:
                state = _state(self.here / name)
                known = record.get(name)
                if state is not None and (known is None or known[:2] != state):
                    self._check(lease.PERIOD_SECONDS)  # files before it may have taken long
                    record[name] = [*state, self._put(name, str(known[-1]) if known else ABSENT)]

            manifests = {name for name in names if name.endswith("manifest.json")}
            _in_threads(put, names - manifests)
            _in_threads(put, manifests)  # last: whoever sees one finds what it names
            for name in [name for name in record if self._is_own(name) and name not in names]:
                self._check(lease.PERIOD_SECONDS)
                self.there.delete(name)
                del record[name]

    def push_with_retries(self) -> None:
        """`push`, repeated for minutes where the store cannot be reached."""
        until = time.monotonic() + _RETRY_PERIODS * lease.PERIOD_SECONDS
        while True:
            try:
                return self.push()
            except ERRORS as error:
                if time.monotonic() >= until:
                    raise
                self._warn(error)
            time.sleep(lease.PERIOD_SECONDS)

    def _push_periodically(self, ended: threading.Event) -> None:
        while not ended.wait(lease.PERIOD_SECONDS):
            try:
                self.push()
            except lease.LeaseLost:
                return  # the lease itself interrupts the job's own thread
            except ERRORS as error:
                # The job continues; the end, or a later round, uploads everything.
                self._warn(error)

    def clear(self, written: Callable[[str], bool]) -> None:
        """Removes everything in the store that is `written`, but the leases."""
        self._check()
        with self._record() as record:
            names = [
                name
                for name in self.there.list()
                if not name.startswith(lease.RUNNING) and written(name)
            ]
            _in_threads(self.there.delete, [name for name in names if name != "run.json"])
            # Last: where this is killed half way, it is still known whose folder it is.
            self.there.delete("run.json")
            record.clear()

    def _discard(self) -> None:
        """A lease is lost: the next pull replaces the files of its kind."""
        with self._record() as record:
            record.update({name: [0, 0, ABSENT] for name in self._names()})

    def _put(self, name: str, version: str) -> str:
        try:
            return self.there.write(name, self.here / name, version)
        except Changed:
            # Written before, but the answer was lost; or by a job of another time. It is this
            # one's to write if the lease is.
            self._check()
            return self.there.write(name, self.here / name)

    def _check(self, older_than_seconds: float = 0.0) -> None:
        assert self.leases, "only a lease's owner writes to the store"
        for one in self.leases:
            one.check(older_than_seconds)

    def _warn(self, error: Exception) -> None:
        said = f"{self._where}: not up to date, will retry ({one_line(error)})"
        print(said, file=sys.stderr)

    def _is_own(self, name: str) -> bool:
        return self._kind_of(name) in self._kinds

    def _names(self) -> set[str]:
        """The files here of this job's kinds."""
        found = set()
        for folder, folders, files in os.walk(self.here):
            # Hidden ones are unfinished, or of this machine.
            folders[:] = [name for name in folders if _copied(name)]
            at = Path(folder).relative_to(self.here)
            found |= {(at / name).as_posix() for name in files if _copied(name)}
        return set(filter(self._is_own, found))

    @contextlib.contextmanager
    def _record(self) -> Iterator[_Record]:
        """What is known of both sides, kept at the end; for one thread of this machine at a time.

        InputError: it is damaged, or one of its names is outside of the folder.
        """
        path = self.here / _RECORD
        with open_lock(self.here / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                record = read_json(path, _checked, "remove it")
            except FileNotFoundError:
                record = {}
            for name in record:
                confined(self.here, name)
            before = dict(record)
            try:
                yield record
            finally:
                if record != before:
                    write_text(path, json.dumps(record))


def _checked(record: _Record) -> _Record:
    """The record, if it is one; TypeError: it is none."""
    if not all(isinstance(known, list) and known for known in record.values()):
        raise TypeError("not what m4 wrote")
    return record


def _in_threads(work: Callable[[str], None], names: Collection[str]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(work, sorted(names)))


def _copied(name: str) -> bool:
    """Whether a file, by its name in the folder, is one that is copied."""
    parts = name.split("/")
    hidden = any(part.startswith(".") for part in parts)
    return _NOT_COPIED.isdisjoint(parts) and (not hidden or parts[-1] == ".hashes.json")


def _state(path: Path) -> list[int | str] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]

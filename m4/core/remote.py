"""A model's folder in an object store (gs://bucket/run): a working copy on this machine's disk.

Jobs append to files, rename, lock and map them into memory, which object stores do not do. So they
work in a local folder; the job's first process brings it up to date when it starts, and takes what
has changed to the store: before each checkpoint, every half minute and at the end. Checkpoints,
which are large and in parts over all processes, go straight to the store (orbax).

A working copy has a file `.remote` with the address that it is a copy of.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from m4.core.files import whole, write_text

MARK = ".remote"
_RECORD = ".remote.json"
_RUNNING = ".running.json"
# Of this machine, or of the store alone.
_NOT_COPIED = {".lock", MARK, _RECORD, _RUNNING, "checkpoints", "compilation_cache"}
PERIOD_SECONDS = 30.0
# A job that has not said for so long that it runs is dead.
_SILENT_PERIODS = 3

# Relative path -> [bytes, time here in ns, bytes there, time there].
_Record = dict[str, list[int]]

_at_work: dict[Path, "_Copy"] = {}


def is_remote(model_dir: str) -> bool:
    """Whether it is an address (gs://bucket/run) and no path."""
    return "://" in model_dir


def local(model_dir: str) -> Path:
    """The folder to work in: of a path itself, of an address its working copy. Reads nothing.

    Working copies are in $XDG_CACHE_HOME/m4 (~/.cache/m4).
    """
    if not is_remote(model_dir):
        return Path(model_dir)
    address = model_dir.rstrip("/")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m4"
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    folder = base / f"{address.rsplit('/', 1)[-1]}.{digest}"
    if not (folder / MARK).is_file():
        write_text(folder / MARK, address + "\n")
    return folder


def place(folder: Path) -> epath.Path:
    """Where a folder within a model's folder really is: in the store, for a working copy."""
    for parent in (folder, *folder.parents):
        if (parent / MARK).is_file():
            return _there(parent) / folder.relative_to(parent).as_posix()
    return epath.Path(folder)


def fetch(folder: Path) -> None:
    """Brings a working copy up to date, for reading; nothing where `folder` is none.

    Nor where a job of this machine is at work in it: that one keeps it up to date, and has files
    open that must not be replaced.
    """
    if not (folder / MARK).is_file() or folder in _at_work:
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        _Copy(folder).pull()


def push(folder: Path) -> None:
    """Takes to the store what has changed in or around `folder`, if this process keeps it."""
    for parent in (folder, *folder.parents):
        if parent in _at_work:
            _at_work[parent].push()


def start_over(folder: Path) -> None:
    """Removes what the store has of a folder that this process keeps."""
    if folder in _at_work:
        _at_work[folder].clear()


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Within it the store follows the working copy, if `folder` is one.

    Raises:
        ValueError: another job is at work there. Where the store cannot be reached: its client's
            error, which is nobody's mistake and may be over when the job is started again.
    """
    if not (folder / MARK).is_file():
        yield
        return
    copy = _Copy(folder)
    copy.take()
    copy.pull()
    ended = threading.Event()
    thread = threading.Thread(target=copy.follow, args=(ended,), daemon=True)
    _at_work[folder] = copy
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        del _at_work[folder]
        copy.push()
        copy.leave()


def _there(folder: Path) -> epath.Path:
    address = (folder / MARK).read_text(encoding="utf-8").strip()
    # epath knows no file://; a disk that others see is as good a store.
    return epath.Path(address.removeprefix("file://"))


class _Copy:
    """A working copy and what it is a copy of."""

    def __init__(self, folder: Path) -> None:
        self.here, self.there = folder, _there(folder)
        self._busy = threading.Lock()
        self._me = {"host": socket.gethostname(), "pid": os.getpid()}

    # ---------------------------------------------------------------------------- files

    def pull(self) -> None:
        """Makes the copy what the store has; files that both have alike stay."""
        with self._busy:
            record = self._record()
            found: _Record = {}
            for name, size, changed in self._listed(self.there, ""):
                target = self.here / name
                known = record.get(name)
                if known is not None and known[2:] == [size, changed] and target.exists():
                    # The same there as when it was copied. If it is another one here, a job was
                    # killed before it could take it there: the newer one stays.
                    found[name] = known
                    continue
                if known is None or known != [*(_state(target) or ()), size, changed]:
                    with (
                        whole(target) as part,
                        part.open("wb") as file,
                        (self.there / name).open("rb") as source,
                    ):
                        shutil.copyfileobj(source, file, 1 << 20)
                found[name] = [*(_state(target) or ()), size, changed]
            for name in record.keys() - found.keys():
                (self.here / name).unlink(missing_ok=True)
            self._write(found)

    def push(self) -> None:
        """Makes the store what the copy has."""
        with self._busy:
            record = self._record()
            found: _Record = {}
            for name in self._names():
                state = _state(self.here / name)
                known = record.get(name)
                if state is None:
                    continue  # gone meanwhile
                if known is None or known[:2] != state:
                    self._put(name)
                    at = (self.there / name).stat()
                    known = [*state, int(at.length), int(at.mtime)]
                found[name] = known
            for name in record.keys() - found.keys():
                (self.there / name).unlink(missing_ok=True)
            if found != record:
                self._write(found)

    def clear(self) -> None:
        """Removes everything in the store, but that this process is at work."""
        with self._busy:
            # The record of whose folder it is goes last: killed in the middle, it is still known.
            for path in sorted(self.there.iterdir(), key=lambda path: path.name == "run.json"):
                if path.name != _RUNNING:
                    path.rmtree() if path.is_dir() else path.unlink()
            self._write({})

    def _put(self, name: str) -> None:
        source, target = self.here / name, self.there / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # A store shows an object when it is whole; a disk needs a name of its own meanwhile.
        on_disk = "://" not in os.fspath(target)
        part = target.with_name(f".{target.name}.{os.getpid()}") if on_disk else target
        with source.open("rb") as file, part.open("wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)
        if on_disk:
            part.replace(target)

    def _names(self) -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.here):
            # Hidden ones are unfinished, or of this machine.
            folders[:] = [name for name in folders if _copied(name)]
            found += [os.path.relpath(os.path.join(folder, f), self.here) for f in files
                      if _copied(f)]  # fmt: skip
        return sorted(found)

    def _listed(self, folder: epath.Path, prefix: str) -> Iterator[tuple[str, int, int]]:
        if not folder.exists():
            return
        for path in sorted(folder.iterdir()):
            if not _copied(path.name):
                continue
            if path.is_dir():
                yield from self._listed(path, f"{prefix}{path.name}/")
            else:
                at = path.stat()
                yield f"{prefix}{path.name}", int(at.length), int(at.mtime)

    def _record(self) -> _Record:
        path = self.here / _RECORD
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def _write(self, record: _Record) -> None:
        write_text(self.here / _RECORD, json.dumps(record))

    # ------------------------------------------------------------------- one job at a time

    def take(self) -> None:
        """Says in the store that this process is at work; waits for one that may be dead."""
        other = self._running()
        until = time.monotonic() + _SILENT_PERIODS * PERIOD_SECONDS
        while other is not None and time.monotonic() < until:
            print(
                f"MODEL_DIR = {self.there}: {other['host']} was at work there; waiting whether it "
                "still is",
                file=sys.stderr,
            )
            time.sleep(PERIOD_SECONDS)
            again = self._running()
            if again is not None and again != other:
                raise ValueError(
                    f"MODEL_DIR = {self.there}: another m4 job is at work there ({again['host']}, "
                    f"process {again['pid']})"
                )
            other = again
        self._say()

    def leave(self) -> None:
        """Takes that back, if it is still so."""
        if self._running() is None:
            (self.there / _RUNNING).unlink(missing_ok=True)

    def follow(self, ended: threading.Event) -> None:
        """Pushes and says that this process is at work, every PERIOD_SECONDS until `ended`."""
        while not ended.wait(PERIOD_SECONDS):
            try:
                self._say()
                self.push()
            except Exception as error:  # noqa: BLE001 (TensorFlow's for gs:// are no OSError)
                # The job goes on; the end, or a later round, takes everything.
                print(f"MODEL_DIR = {self.there}: not up to date ({error})", file=sys.stderr)

    def _running(self) -> Mapping[str, Any] | None:
        path = self.there / _RUNNING
        if not path.exists():
            return None
        said = json.loads(path.read_text())
        mine = {name: said[name] for name in self._me} == self._me
        return None if mine else said

    def _say(self) -> None:
        self.there.mkdir(parents=True, exist_ok=True)
        (self.there / _RUNNING).write_text(json.dumps({**self._me, "time": time.time()}))


def _copied(name: str) -> bool:
    return name not in _NOT_COPIED and (not name.startswith(".") or name == ".data.hashes.json")


def _state(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]

"""A model's folder in an object store (gs://bucket/run): a working copy on this machine's disk.

Jobs append to files, rename, lock and map them into memory, which object stores do not do. So they
work in a local folder; the job's first process brings it up to date when it starts, and takes what
has changed to the store: before each checkpoint, every half minute and at the end. Checkpoints,
which are large and in parts over all processes, go straight to the store (orbax).

A working copy has a file `.remote` with the address that it is a copy of, and a name of its own.
One job at a time keeps a folder in the store (`m4.storage.lease`); before it writes there, it looks
whether it still does.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from m4.storage import lease
from m4.storage.files import whole, write_text

MARK = ".remote"
_RECORD = ".remote.json"
# Of this machine, or of the store alone.
_NOT_COPIED = {".lock", MARK, _RECORD, lease.RUNNING, "checkpoints", "compilation_cache"}
# For so long a store that cannot be reached is waited for where the job needs it.
_PATIENT_PERIODS = 10

# Relative path -> [bytes, time here in ns, bytes there, time there].
_Record = dict[str, list[int]]

_at_work: dict[Path, "_WorkingCopy"] = {}


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
        write_text(folder / MARK, f"{address}\n{uuid.uuid4().hex}\n")
    return folder


def remote_path(folder: Path) -> epath.Path:
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
        _WorkingCopy(folder).pull()


def push(folder: Path) -> None:
    """Takes to the store what has changed in or around `folder`, if this process keeps it.

    Raises:
        lease.LeaseLost: another job keeps it now.
        Exception: its client's error, where the store cannot be reached for minutes.
    """
    if copy := _copy_copy_around(folder):
        copy.push_with_retries()


def lease_lost(folder: Path) -> bool:
    """Whether this process kept what `folder` is in, and another job has taken it over."""
    copy = _copy_copy_around(folder)
    return copy is not None and copy.lease is not None and copy.lease.lost is not None


def start_over(folder: Path) -> None:
    """Removes what the store has of a folder that this process keeps."""
    if folder in _at_work:
        _at_work[folder].clear()


@contextlib.contextmanager
def synced(folder: Path) -> Iterator[None]:
    """Within it the store follows the working copy, if `folder` is one.

    Raises:
        ValueError: another job is at work there. Where the store cannot be reached: its client's
            error, which is nobody's mistake and may be over when the job is started again.
        lease.LeaseLost: another job has taken it over meanwhile; from a signal, at any moment.
        lease.UploadFailed: the last files could not be taken there.
    """
    if not (folder / MARK).is_file():
        yield
        return
    mine = lease.Lease(_there(folder), _name(folder), folder)
    copy = _WorkingCopy(folder, mine)
    with lease.interrupt_when_lost(mine):
        mine.acquire()
        try:
            copy.pull()
            with _followed(copy):
                yield
        except BaseException as error:
            if mine.lost is not None:
                copy.discard()
                if error is not mine.lost:
                    raise mine.lost from error
            raise
        finally:
            mine.release()


@contextlib.contextmanager
def _followed(copy: "_WorkingCopy") -> Iterator[None]:
    """Within it changes are taken to the store every PERIOD_SECONDS, and in the end."""
    ended = threading.Event()
    thread = threading.Thread(target=copy.follow, args=(ended,), daemon=True)
    _at_work[copy.here] = copy
    thread.start()
    try:
        try:
            yield
        finally:
            ended.set()
            thread.join()
    except BaseException:
        try:
            copy.push_with_retries()
        except Exception as error:  # noqa: BLE001 (a store's: see `m4.storage.lease`)
            print(copy.unsaved(error), file=sys.stderr)  # the job's own error is the one to raise
        raise
    else:
        try:
            copy.push_with_retries()
        except Exception as error:
            raise lease.UploadFailed(copy.unsaved(error)) from error
    finally:
        del _at_work[copy.here]


def _copy_copy_around(folder: Path) -> "_WorkingCopy | None":
    return next((_at_work[p] for p in (folder, *folder.parents) if p in _at_work), None)


def _there(folder: Path) -> epath.Path:
    address = (folder / MARK).read_text(encoding="utf-8").splitlines()[0]
    # epath knows no file://; a disk that others see is as good a store.
    return epath.Path(address.removeprefix("file://"))


def _name(folder: Path) -> str:
    """The working copy's own name."""
    return (folder / MARK).read_text(encoding="utf-8").splitlines()[1]


class _WorkingCopy:
    """A working copy and what it is a copy of."""

    def __init__(self, folder: Path, kept_by: lease.Lease | None = None) -> None:
        self.here, self.there, self.lease = folder, _there(folder), kept_by
        self._busy = threading.Lock()

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
        """Makes the store what the copy has, if it is this job's to write to."""
        with self._busy:
            self._check()
            record = self._record()
            found: _Record = {}
            for name in self._names():
                state = _state(self.here / name)
                known = record.get(name)
                if state is None:
                    continue  # gone meanwhile
                if known is None or known[:2] != state:
                    self._check(lease.PERIOD_SECONDS)  # files before it may have taken long
                    self._put(name)
                    at = (self.there / name).stat()
                    known = [*state, int(at.length), int(at.mtime)]
                found[name] = known
            for name in record.keys() - found.keys():
                (self.there / name).unlink(missing_ok=True)
            if found != record:
                self._write(found)

    def clear(self) -> None:
        """Removes everything in the store, but who is at work."""
        with self._busy:
            self._check()
            # The record of whose folder it is goes last: killed in the middle, it is still known.
            for path in sorted(self.there.iterdir(), key=lambda path: path.name == "run.json"):
                if path.name != lease.RUNNING:
                    path.rmtree() if path.is_dir() else path.unlink()
            self._write({})

    def _put(self, name: str) -> None:
        source, target = self.here / name, self.there / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as file, lease.atomic_upload(target) as part, part.open("wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)

    def push_with_retries(self) -> None:
        """`push`, again and again for minutes where the store cannot be reached."""
        until = time.monotonic() + _PATIENT_PERIODS * lease.PERIOD_SECONDS
        while True:
            try:
                self.push()
            except Exception as error:
                if time.monotonic() >= until:
                    raise
                self._tell(error)
            else:
                return
            time.sleep(lease.PERIOD_SECONDS)

    def follow(self, ended: threading.Event) -> None:
        """Pushes every PERIOD_SECONDS until `ended`, or until another job has the folder."""
        while not ended.wait(lease.PERIOD_SECONDS):
            try:
                self.push()
            except lease.LeaseLost:
                return  # the job's own thread is told by its lease
            except Exception as error:  # noqa: BLE001 (a store's: see `m4.storage.lease`)
                # The job goes on; the end, or a later round, takes everything.
                self._tell(error)

    def unsaved(self, error: Exception) -> str:
        """What to do where the last files did not get there."""
        return (
            f"MODEL_DIR = {self.there}: the job's last files could not be taken there "
            f"({_line(error)}); they are in {self.here}, and the same command on this machine "
            "takes them there"
        )

    def discard(self) -> None:
        """The store is another job's: what it says goes, whatever there is here."""
        self._write({name: [0, 0, 0, 0] for name in self._names()})

    def _check(self, older_than_seconds: float = 0.0) -> None:
        assert self.lease is not None, "only who keeps a folder writes there"
        self.lease.check(older_than_seconds)

    def _tell(self, error: Exception) -> None:
        print(
            f"MODEL_DIR = {self.there}: not up to date, it is tried again ({_line(error)})",
            file=sys.stderr,
        )

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


def _copied(name: str) -> bool:
    return name not in _NOT_COPIED and (not name.startswith(".") or name == ".data.hashes.json")


def _state(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__

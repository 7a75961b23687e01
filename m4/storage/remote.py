"""A run's folder in an object store (gs://bucket/run): a working copy on this machine's disk.

Jobs append to files, rename, lock and map them into memory, which object stores do not do. So they
work in a local folder. The job's primary process brings it up to date at the start, and uploads
what has changed before each checkpoint, every half minute and at the end. Checkpoints, which are
large and sharded over all processes, go straight to the store (orbax).

A working copy has a file `.remote` with its address and the copy's name. One job at a time has
the lease of a folder in the store (`m4.storage.lease`), and checks it before it writes there.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath

from m4.settings import InputError
from m4.storage import lease
from m4.storage.files import confined, whole, write_text

MARK = ".remote"
_RECORD = ".remote.json"
# Of this machine, or of the store alone.
_NOT_COPIED = {".lock", MARK, _RECORD, lease.RUNNING, "checkpoints", "compilation_cache", "logs"}
# For so many periods a push that the job waits for is repeated.
_RETRY_PERIODS = 10
_THREADS = 8

# Relative path -> [bytes, time here in ns, bytes there, time there].
_Record = dict[str, list[int]]

_requested: set[Path] = set()  # working copies whose address this process was given
_open: dict[Path, "_WorkingCopy"] = {}


def is_remote(model_dir: str) -> bool:
    """Whether it is an address (gs://bucket/run) and no path."""
    return "://" in model_dir


def local(model_dir: str) -> Path:
    """The folder to work in: a path's own, an address's working copy. Downloads nothing.

    Working copies are in $XDG_CACHE_HOME/m4 (~/.cache/m4).
    """
    if not is_remote(model_dir):
        return Path(model_dir)
    address = model_dir.rstrip("/")
    folder = _copy_of(address)
    if not (folder / MARK).is_file():
        write_text(folder / MARK, f"{address}\n{uuid.uuid4().hex}\n")
    _requested.add(folder)
    return folder


def remote_path(folder: Path) -> epath.Path:
    """Where a folder within a run's folder really is: for a working copy, in the store."""
    for parent in (folder, *folder.parents):
        if is_working_copy(parent):
            return _address(parent) / folder.relative_to(parent).as_posix()
    return epath.Path(folder)


def is_working_copy(folder: Path) -> bool:
    """Whether the store has this folder.

    Raises:
        ValueError: its mark names an address whose working copy is elsewhere: a folder that was
            made by a stranger must not decide where files are written and deleted.
    """
    if not (folder / MARK).is_file():
        return False
    address = _mark(folder)[0]
    if folder.absolute() not in _requested and folder.absolute() != _copy_of(address):
        raise InputError(
            f"{folder}/{MARK} names {address}, whose working copy is another folder: give "
            "--model_dir the address, or remove that file"
        )
    return True


def fetch(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Brings a working copy up to date, for reading; does nothing with another folder.

    Nor while a job of this machine works in it: that job keeps it up to date, and has files open
    that must not be replaced. wanted: whether a file is needed, by its name in the folder.
    """
    if not is_working_copy(folder) or folder in _open:
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        _WorkingCopy(folder).pull(wanted)


@contextlib.contextmanager
def locked(folder: Path, setting: str = "MODEL_DIR") -> Iterator[None]:
    """One job at a time writes into a folder; within it the store follows a working copy.

    setting: the folder's name, for messages.

    Raises:
        ValueError: another process is at work there, or it cannot be written. The others: `synced`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"{setting} = {folder}: cannot be made or written ({error})") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{setting} = {folder}: another m4 job is at work there") from None
        with synced(folder):
            yield


def push(folder: Path) -> None:
    """Uploads what has changed in the working copy around `folder`, if this process has its lease.

    Raises:
        lease.LeaseLost: another job has it now.
        Exception: the store's client's, where the store cannot be reached for minutes.
    """
    if copy := _copy_around(folder):
        copy.push_with_retries()


def lease_lost(folder: Path) -> bool:
    """Whether this process had the lease of what `folder` is in, and lost it."""
    copy = _copy_around(folder)
    return copy is not None and copy.lease is not None and copy.lease.lost is not None


def start_over(folder: Path) -> None:
    """Removes what the store has of a folder whose lease this process has."""
    if folder in _open:
        _open[folder].clear()


@contextlib.contextmanager
def synced(folder: Path) -> Iterator[None]:
    """Within it the store follows the working copy, if `folder` is one.

    Raises:
        ValueError: another job is at work there.
        lease.LeaseLost: another job has taken it over meanwhile; from a signal, at any moment.
        lease.UploadFailed: the last files could not be uploaded.
        Exception: the store's client's, where the store cannot be reached; the job may be started
            again.
    """
    if not is_working_copy(folder):
        yield
        return
    mine = lease.Lease(_address(folder), _mark(folder)[1], folder)
    copy = _WorkingCopy(folder, mine)
    with lease.interrupt_when_lost(mine):
        mine.acquire()
        try:
            copy.pull()
            with _pushed(copy):
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
def _pushed(copy: "_WorkingCopy") -> Iterator[None]:
    """Within it changes are uploaded every PERIOD_SECONDS, and at the end."""
    ended = threading.Event()
    thread = threading.Thread(target=copy.push_periodically, args=(ended,), daemon=True)
    _open[copy.here] = copy
    thread.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        ended.set()
        thread.join()
        try:
            copy.push_with_retries()
        except Exception as error:
            if not failed:
                raise lease.UploadFailed(copy.upload_failed(error)) from error
            print(copy.upload_failed(error), file=sys.stderr)  # the job's own error is raised
        finally:
            del _open[copy.here]


def _copy_of(address: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m4"
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return base.absolute() / f"{address.rsplit('/', 1)[-1]}.{digest}"


def _copy_around(folder: Path) -> "_WorkingCopy | None":
    return next((_open[p] for p in (folder, *folder.parents) if p in _open), None)


def _mark(folder: Path) -> tuple[str, str]:
    """The address that a folder is a working copy of, and the copy's own name."""
    lines = (folder / MARK).read_text(encoding="utf-8").splitlines()
    if len(lines) != 2:
        raise InputError(f"{folder}/{MARK}: must have two lines, an address and a name")
    return lines[0], lines[1]


def _address(folder: Path) -> epath.Path:
    # epath knows no file://; a disk that others see is as good a store.
    return epath.Path(_mark(folder)[0].removeprefix("file://"))


class _WorkingCopy:
    """A working copy and what it is a copy of; with the lease, it may write there."""

    def __init__(self, folder: Path, mine: lease.Lease | None = None) -> None:
        self.here, self.there, self.lease = folder, _address(folder), mine
        self._busy = threading.Lock()

    def pull(self, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Makes the copy equal to the store; files that both have alike stay."""
        with self._busy:
            record = self._record()
            found: _Record = {name: known for name, known in record.items() if not wanted(name)}
            missing: list[tuple[str, int, int]] = []
            for name, size, changed in self._listed(self.there, ""):
                if not wanted(name):
                    continue
                target = confined(self.here, name)
                known = record.get(name)
                if known is not None and known[2:] == [size, changed] and target.exists():
                    # The same there as when it was copied. If it is another one here, a job was
                    # killed before it could upload it: the newer one stays.
                    found[name] = known
                    continue
                if known is not None and known == [*(_state(target) or ()), size, changed]:
                    found[name] = known
                else:
                    missing.append((name, size, changed))
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self._get, [name for name, *_ in missing]))
            for name, size, changed in missing:
                found[name] = [*(_state(self.here / name) or ()), size, changed]
            for name in record.keys() - found.keys():
                confined(self.here, name).unlink(missing_ok=True)
            self._write(found)

    def push(self) -> None:
        """Makes the store equal to the copy. LeaseLost: it is another job's."""
        with self._busy:
            self._check()
            record = self._record()
            found: _Record = {}
            for name in self._names():
                state = _state(self.here / name)
                known = record.get(name)
                if state is None:
                    continue  # removed meanwhile
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

    def push_with_retries(self) -> None:
        """`push`, repeated for minutes where the store cannot be reached."""
        until = time.monotonic() + _RETRY_PERIODS * lease.PERIOD_SECONDS
        while True:
            try:
                return self.push()
            except Exception as error:
                if time.monotonic() >= until:
                    raise
                self._warn(error)
            time.sleep(lease.PERIOD_SECONDS)

    def push_periodically(self, ended: threading.Event) -> None:
        """Pushes every PERIOD_SECONDS until `ended`, or until another job has the folder."""
        while not ended.wait(lease.PERIOD_SECONDS):
            try:
                self.push()
            except lease.LeaseLost:
                return  # the lease itself interrupts the job's own thread
            except Exception as error:  # noqa: BLE001 (a store's: see `m4.storage.lease`)
                # The job continues; the end, or a later round, uploads everything.
                self._warn(error)

    def clear(self) -> None:
        """Removes everything in the store but the leases."""
        with self._busy:
            self._check()
            # run.json last: where this is killed half way, it is still known whose folder it is.
            for path in sorted(self.there.iterdir(), key=lambda path: path.name == "run.json"):
                if path.name != lease.RUNNING:
                    path.rmtree() if path.is_dir() else path.unlink()
            self._write({})

    def discard(self) -> None:
        """The lease is lost: the next pull replaces whatever is here."""
        self._write({name: [0, 0, 0, 0] for name in self._names()})

    def upload_failed(self, error: Exception) -> str:
        """What to do where the last files were not uploaded."""
        return (
            f"MODEL_DIR = {self.there}: the job's last files could not be uploaded "
            f"({_line(error)}); they are in {self.here}, and the same command on this machine "
            "uploads them"
        )

    def _get(self, name: str) -> None:
        with (
            whole(self.here / name) as part,
            part.open("wb") as file,
            (self.there / name).open("rb") as source,
        ):
            shutil.copyfileobj(source, file, 1 << 20)

    def _put(self, name: str) -> None:
        source, target = self.here / name, self.there / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as file, lease.atomic_upload(target) as part, part.open("wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)

    def _check(self, older_than_seconds: float = 0.0) -> None:
        assert self.lease is not None, "only the lease's owner writes to the store"
        self.lease.check(older_than_seconds)

    def _warn(self, error: Exception) -> None:
        print(
            f"MODEL_DIR = {self.there}: not up to date, will retry ({_line(error)})",
            file=sys.stderr,
        )

    def _names(self) -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.here):
            # Hidden ones are unfinished, or of this machine.
            folders[:] = [name for name in folders if _copied(name)]
            at = Path(folder).relative_to(self.here)
            found += [(at / name).as_posix() for name in files if _copied(name)]
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
        """ValueError: it is damaged, or one of its names is outside of the folder."""
        path = self.here / _RECORD
        if not path.is_file():
            return {}
        try:
            record = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: damaged ({_line(error)}); remove it") from error
        for name in record:
            confined(self.here, name)
        return record

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

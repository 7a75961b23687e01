"""A folder in a bucket (gs://BUCKET/run), and the copy of it in which this machine works.

A job's primary process brings the copy up to date at the start, and uploads what has changed before
each checkpoint, every half minute and at the end. Checkpoints, which are large and sharded over all
processes, go straight to the bucket (`address_of`). Copies are in $XDG_CACHE_HOME/m4: one for each
address and each set of kinds of files that a job writes, and one for reading. A job uploads and
removes files of its own kinds only.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from m4.parallel.platform import signals
from m4.parallel.platform.hardware import cache_folder
from m4.settings import InputError
from m4.storage import locks
from m4.storage.checksums import Disk
from m4.storage.files import check_tree, confined, read_json, remove, whole, write_text
from m4.storage.objects import ERRORS, Objects, Unreachable, check_place, is_address, one_line
from m4.storage.records import count, entry, named, text

COMPILED = "compilation_cache"
_RECORD = ".bucket.json"
# Number of periods for which an upload that the job waits for is repeated.
_RETRY_PERIODS = 10
_THREADS = 8
# Number of calls of `BoundedCopy.need` for which files stay: for steps at hand and steps ahead.
_KEPT_NEEDS = 16

# Entry of a file in a copy's record: its size and version here, and the bucket's version.
_KNOWN = named(entry(count, text, text))

# Local copy -> address, for the copies that this process has opened.
_addresses: dict[Path, str] = {}
_open_copies: list["LocalCopy"] = []


def copy_of(address: str, use: str = "read") -> Path:
    """Returns the local copy of an address for a use: "read", or the kinds that a job writes."""
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    folder = cache_folder() / f"{address.rsplit('/', 1)[-1]}.{digest}" / use
    _addresses[folder] = address
    return folder


def address_of(folder: Path) -> epath.Path:
    """Returns the place of a folder's checkpoints and traces: for a copy, in the bucket."""
    for parent in (folder, *folder.parents):
        if (address := _addresses.get(parent)) is not None:
            name = folder.relative_to(parent).as_posix()
            if not name.startswith("baselines/"):  # one machine trains these in its copy
                return epath.Path(address) / name
    return epath.Path(folder)


def _is_for_readers(name: str) -> bool:
    """Returns False for files that only jobs need: compiled programs, baselines' checkpoints."""
    return {COMPILED, "checkpoints"}.isdisjoint(name.split("/"))


def fetched(place: str | Path, wanted: Callable[[str], bool] = _is_for_readers) -> Path:
    """Returns the local folder of a path or an address, for reading.

    A path is checked (`files.check_tree`) and used as it is. For an address, the copy for reading
    gets the `wanted` files up to date. By default these exclude compiled programs, which would be
    run although the folder may be a stranger's.
    """
    check_place(str(place))
    if not is_address(str(place)):
        check_tree(Path(place))
        return Path(place)
    copy = LocalCopy(str(place))
    with locks.local_lock(copy.here / ".lock", str(place), seconds=-1):
        copy.pull(wanted)
    return copy.here


# File that is written last into a folder that never changes again, so it marks a complete one.
MANIFEST = "manifest.json"


def local_place(place: str) -> Path:
    """Returns the local folder of a path, or of an address whose folders never change."""
    return copy_of(place, "corpora") if is_address(place) else Path(place)


def finished_folder(
    place: str, name: str, needs: Callable[[str], bool] = lambda name: True
) -> Path | None:
    """Returns the local folder of a finished one, or None if `place` has none of this name.

    From a bucket, only the files for which `needs` is true are fetched.
    """
    folder = local_place(place) / name
    if not is_address(place):
        return folder if (folder / MANIFEST).is_file() else None
    objects = Objects(f"{place.rstrip('/')}/{name}")
    there = objects.list()
    if MANIFEST not in there:
        return None
    missing = [name for name in there if needs(name) and not confined(folder, name).is_file()]
    _in_threads(lambda name: objects.download(name, folder / name), missing)
    return folder


def upload_finished(place: str, name: str) -> None:
    """Uploads a finished folder that was made on this machine if `place` is a bucket."""
    if is_address(place):
        folder, objects = local_place(place) / name, Objects(f"{place.rstrip('/')}/{name}")
        names = [one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()]
        _in_threads(lambda name: objects.put(name, folder / name), {*names} - {MANIFEST})
        objects.put(MANIFEST, folder / MANIFEST)


def upload(folder: Path) -> None:
    """Uploads what this process's job has changed if `folder` is in a local copy."""
    for copy in _open_copies:
        if copy.here in (folder, *folder.parents):
            copy.push_with_retries()


class LocalCopy:
    """A local copy of a folder in a bucket."""

    def __init__(
        self, address: str, kinds: Sequence[str] = (),
        kind_of: Callable[[str], str] = lambda name: "", where: str = "",
    ) -> None:  # fmt: skip
        """Prepares the copy, without sending a request.

        Args:
            address: gs://BUCKET/FOLDER.
            kinds: Kinds of files that the job writes; none for reading.
            kind_of: Function that returns the kind of a file, given its name in the folder.
            where: Setting and its value, for messages.
        """
        if importlib.util.find_spec("gcsfs") is None:  # for etils, and so for orbax
            raise InputError(f"{address}: gcsfs is missing (`make setup`); gs:// needs it")
        self.here, self.objects = copy_of(address, "-".join(kinds) or "read"), Objects(address)
        self._disk = Disk(self.here)
        self._kinds, self._kind_of, self._where = kinds, kind_of, where or address
        self._locks: list[locks.BucketLock] = []
        self._alone = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the locks of the job's kinds, and meanwhile uploads changes of the copy.

        Raises:
            Busy: Another job writes files of these kinds.
            Unreachable: The last files could not be uploaded.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(locks.local_lock(self.here / ".lock", self._where))
            for kind in self._kinds:
                self.lock(stack, kind)
            self.pull(lambda name: self._is_own(name) or _is_for_readers(name))
            stack.enter_context(self._followed())
            yield

    def lock(self, stack: contextlib.ExitStack, kind: str, *, wait: bool = True) -> None:
        """Holds the lock of a kind until `stack` is closed."""
        if not (name := self.here / ".name").is_file():
            write_text(name, uuid.uuid4().hex)
        copy = name.read_text(encoding="utf-8")
        lock = locks.BucketLock(self.objects, kind, copy, self._where, self._lost)
        stack.callback(lock.release)
        lock.acquire(wait=wait)
        if kind in self._kinds:
            self._locks.append(lock)
            stack.callback(self._locks.remove, lock)

    def _lost(self, said: str) -> None:
        """Ends the process. The next job here begins with what the bucket has."""
        (self.here / _RECORD).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            print(f"m4: {said}", file=sys.stderr, flush=True)
        os._exit(locks.LOST_STATUS)

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Uploads changes in every period, and at the end."""
        ended = threading.Event()

        def push_periodically() -> None:
            while not ended.wait(locks.PERIOD_SECONDS):
                self._pushed(last=False)  # a later round, or the end, uploads everything

        thread = threading.Thread(target=push_periodically, daemon=True)
        _open_copies.append(self)
        thread.start()
        try:
            yield
        finally:
            failed = sys.exception() is not None
            ended.set()
            thread.join()
            _open_copies.remove(self)
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
                    raise Unreachable(said) from error
                print(said, file=sys.stderr)  # the job's own error is raised

    def push_with_retries(self) -> None:
        """Uploads changes; repeats it for minutes while the bucket cannot be reached."""
        until = time.monotonic() + _RETRY_PERIODS * locks.PERIOD_SECONDS
        while not self._pushed(last=time.monotonic() >= until):
            time.sleep(locks.PERIOD_SECONDS)

    def _pushed(self, *, last: bool) -> bool:
        """Uploads changes; returns False, with a line on stderr, if another try may help."""
        try:
            self.push()
        except ERRORS as error:
            if last:
                raise
            said = f"{self._where}: not up to date, will retry ({one_line(error)})"
            print(said, file=sys.stderr)
            return False
        return True

    def pull(self, wanted: Callable[[str], bool]) -> None:
        """Makes the copy equal to the bucket, without fetching equal files.

        A file that a killed job on this machine changed and did not upload stays, unless the
        bucket's file has changed since.
        """
        record = self._read_record()
        there = {
            name: found.version
            for name, found in self.objects.list().items()
            if _is_copied(name) and wanted(name)
        }

        def get(name: str) -> None:
            target, known = confined(self.here, name), record.get(name)
            if known is None or known[-1] != there[name] or not target.exists():
                # JAX does not use a cache of programs that others could write to.
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                version = self.objects.download(name, target)
                record[name] = [*self._disk.look(name)[:2], version]

        try:
            _in_threads(get, there)
            for name in [name for name in record if wanted(name) and name not in there]:
                confined(self.here, name).unlink(missing_ok=True)
                del record[name]
        finally:
            self._write_record(record)

    def push(self, names: Collection[str] | None = None) -> None:
        """Makes the bucket's files of this job's kinds equal to the copy's.

        If there are `names`, only these are uploaded, whatever their kind, which must be locked.
        """
        with self._alone:
            for lock in self._locks:
                lock.check()
            record = self._read_record()
            here: dict[str, list[int | str]] = {
                name: [one.size, one.version]
                for name, one in self._disk.list().items()
                if (name in names if names is not None else _is_copied(name) and self._is_own(name))
            }

            def put(name: str) -> None:
                for lock in self._locks:
                    lock.check(locks.PERIOD_SECONDS)
                with contextlib.suppress(FileNotFoundError):  # the file was removed meanwhile
                    version = self.objects.put(name, self.here / name)
                    # This version is from before the upload: a change since is uploaded again.
                    record[name] = [*here[name], version]

            try:
                _in_threads(put, [n for n in here if record.get(n, [])[:-1] != here[n]])
                gone = [name for name in record if self._is_own(name) and name not in here]
                for name in gone if names is None else ():
                    self.objects.delete(name)
                    del record[name]
            finally:
                self._write_record(record)

    def clear(self, written: Callable[[str], bool]) -> None:
        """Removes the bucket's objects that are `written`; all kinds must be locked."""
        with self._alone:
            for lock in self._locks:
                lock.check()
            names = [n for n in self.objects.list() if not n.startswith(locks.RUNNING)]
            names = [name for name in names if written(name)]
            # run.json goes last, so that an interruption leaves the folder's owner known.
            _in_threads(self.objects.delete, [name for name in names if name != "run.json"])
            self.objects.delete("run.json")
            self._write_record({n: r for n, r in self._read_record().items() if not written(n)})

    def _is_own(self, name: str) -> bool:
        return self._kind_of(name) in self._kinds

    def _read_record(self) -> dict[str, list[int | str]]:
        """Returns the record of files that were equal; without one, the copy is emptied."""
        path = self.here / _RECORD
        try:
            record = read_json(path, _KNOWN, remedy="remove it")
        except FileNotFoundError:
            for path in self.here.iterdir() if self.here.is_dir() else ():
                if not path.name.startswith("."):
                    remove(path)
            record = {}
        for name in record:
            confined(self.here, name)
        return record

    def _write_record(self, record: dict[str, list[int | str]]) -> None:
        write_text(self.here / _RECORD, json.dumps(record))


@dataclasses.dataclass
class BoundedCopy:
    """Unchanging files of a bucket, which are fetched when needed into limited room.

    Files that were not needed for the longest time are removed first. Each process locks a folder
    of its own until it ends, so that no process removes files that another one reads. Files in the
    corpus's own folder, which was made here or belongs to a job that needs all, are read there.

    Attributes:
        address: Address of the folder in the bucket.
        folder: Local folder; `here` is this process's folder within it.
        files: Name -> size and SHA-256.
        gigabytes: Maximum size of the fetched files (`Data.disk_gigabytes`).
    """

    address: str
    folder: Path
    files: Mapping[str, Sequence[Any]]
    gigabytes: float

    def __post_init__(self) -> None:
        self._objects = Objects(self.address)
        self.held = contextlib.ExitStack()
        self.here = self._claim()
        there = [name for name in self.files if (self.here / name).is_file()]
        there.sort(key=lambda name: (self.here / name).stat().st_mtime_ns)
        # Name -> bytes of each file that is here, the least recently needed one first.
        self._there = {name: self.files[name][0] for name in there}
        self._needed: deque[set[str]] = deque(maxlen=_KEPT_NEEDS)
        self._on_remove: dict[str, Callable[[], object]] = {}
        self._alone = threading.RLock()
        self._make_room(0)

    def _claim(self) -> Path:
        """Locks and returns the first folder that no process uses."""
        for number in itertools.count():
            place = self.folder / f"shards.{number}"
            with contextlib.suppress(locks.Busy):
                lock = locks.local_lock(place / ".lock", self.address, seconds=0)
                self.held.enter_context(lock)
                return place
        raise AssertionError("endless")

    def path(self, name: str, on_remove: Callable[[], object]) -> Path:
        """Returns the path of a file, after fetching it if it is not here.

        `on_remove`, which must release its memory maps, is called when the file is removed.
        """
        if (own := self.folder / name).is_file():
            return own
        with self._alone:
            if name not in self._there:
                self.need([name])
            self._on_remove[name] = on_remove
        return self.here / name

    def need(self, names: Iterable[str]) -> None:
        """Fetches the files that are not here; they stay during the next `_KEPT_NEEDS` - 1 calls.

        Raises:
            InputError: There is no room for the files, or one is missing or damaged.
        """
        with self._alone:
            wanted = {name for name in names if not (self.folder / name).is_file()}
            self._needed.append(wanted)
            for name in sorted(wanted & self._there.keys()):
                self._there[name] = self._there.pop(name)
            missing = sorted(wanted - self._there.keys())
            self._make_room(sum(self.files[name][0] for name in missing))
            _in_threads(self._fetch, missing)
            self._there |= {name: self.files[name][0] for name in missing}

    def _make_room(self, size: int) -> None:
        pinned = set().union(*self._needed)
        most = int(self.gigabytes * 1e9)
        room = most - size - sum(self._there.values())
        for name in [name for name in self._there if name not in pinned]:
            if room >= 0:
                break
            room += self._there.pop(name)
            self._on_remove.pop(name, lambda: None)()
            (self.here / name).unlink(missing_ok=True)
        if room < 0:
            said = f"{(most - room) / 1e9:.3g} GB of {self.address} at once"
            raise InputError(f"Data.disk_gigabytes = {self.gigabytes:g}: a few steps need {said}")

    def _fetch(self, name: str) -> None:
        where = f"{self.address}/{name}"
        with whole(self.here / name) as part:
            try:
                self._objects.download(name, part)
            except FileNotFoundError as error:
                said = "missing, a part of the corpus; remove the corpus there"
                raise InputError(f"{where}: {said}") from error
            if Disk(self.here).sha256(part.name)[1] != self.files[name][1]:
                raise InputError(f"{where}: damaged: its content is not what was written")


def _is_copied(name: str) -> bool:
    """Returns whether a file is copied, as checkpoints, corpora, logs and hidden files are not."""
    parts = name.split("/")
    if parts[0] != "baselines" and "checkpoints" in parts:
        return False
    return not any(p in ("data", "logs") or p[0] == "." or "orbax-checkpoint-tmp" in p
                   for p in parts if p)  # fmt: skip


def _in_threads(work: Callable[[str], object], names: Collection[str]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(work, sorted(names)))

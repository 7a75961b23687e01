"""SHA-256 of files: computed when they are written, compared when they are read.

How much is compared is the process's choice (`--verify`): "fast" sizes and names, "full" the
content. What was compared once and has not changed since is not read again.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from m4.storage.files import write_text
from m4.storage.objects import Object
from m4.storage.records import count, entry, named, text

# Name -> (size in bytes, SHA-256), and their kind in a manifest.
Files = Mapping[str, Sequence[Any]]
FILES = named(entry(count, text))
Level = Literal["fast", "full"]
LEVELS: tuple[str, ...] = get_args(Level)
_THREADS = 8
# Files that changed less long ago may change again within the same tick of their disk's clock.
_TICK_SECONDS = 2.0
# Smaller files are read even where only sizes are compared.
_SMALL_BYTES = 1 << 16
# Less is read again in no time.
_WORTH_BYTES = 1 << 24


class Folder(Protocol):
    """The files of a folder, by their names relative to it: a `Disk`, or `objects.Objects`."""

    @property
    def address(self) -> str: ...
    def list(self) -> dict[str, Object]: ...
    def sha256(self, name: str) -> tuple[int, str]: ...


class Disk:
    """A folder on a disk. Versions are inodes and times."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.address = os.path.abspath(folder)

    def list(self) -> dict[str, Object]:
        """Returns name -> size, version and time of each file."""
        found = {}
        for folder, _, files in os.walk(self.address):
            for path in (Path(folder, file) for file in files):
                with contextlib.suppress(FileNotFoundError):
                    is_ = path.stat()
                    version = f"{is_.st_ino}.{is_.st_mtime_ns}"
                    name = path.relative_to(self.address).as_posix()
                    found[name] = Object(is_.st_size, version, is_.st_mtime)
        return found

    def sha256(self, name: str) -> tuple[int, str]:
        """Returns a file's size and SHA-256."""
        with Path(self.address, name).open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest


class _Choice:
    level: Level = "full"
    remembered: bool = True  # what an earlier process of this machine has compared


_same: set[tuple[str, str, str, str]] = set()  # address, name, version, SHA-256


def choose(level: Level | None) -> None:
    """Sets how much this process compares from now on.

    Without a level it compares everything but files that this machine has compared before and that
    have not changed since (`problem(once=True)`).
    """
    _Choice.level, _Choice.remembered = level or "full", level is None


def chosen() -> Level:
    return _Choice.level


def hashes(store: Folder, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Returns size and SHA-256 of a folder's files, which several threads read."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(store.sha256, names), strict=True))


def problem(
    store: Folder,
    files: Files,
    wanted: Callable[[str], bool] = lambda name: True,
    level: Level | None = None,
    *,
    once: bool = False,
) -> str | None:
    """Returns what is wrong with the first of a folder's files that is wrong, or None.

    Args:
        files: Sizes and hashes as they were written.
        wanted: Which files' content is compared, by name; sizes are compared of all.
        level: How much is compared. Defaults to the process's choice.
        once: Whether the machine remembers what it has compared, in $XDG_CACHE_HOME/m4/verified,
            and does not read it again.
    """
    there, record = store.list(), _record_of(store.address)
    if once and _Choice.remembered:
        _same.update(_read_record(record, store.address))
    for name, (size, _) in files.items():
        if name not in there:
            return f"{name}: missing"
        if there[name].size != size:
            return f"{name}: {there[name].size:,} bytes of {size:,}"
    full = (level or _Choice.level) == "full"
    read = [
        name
        for name, (size, sha256) in files.items()
        if wanted(name)
        and (full or size <= _SMALL_BYTES)
        and (store.address, name, there[name].version, sha256) not in _same
    ]
    try:
        found = hashes(store, read)
    except FileNotFoundError as error:
        return f"{error.filename or error}: missing"
    for name in read:
        if found[name][1] != files[name][1]:
            return f"{name}: its content is not what was written"
    now = time.time()
    for name in read:
        if now - there[name].updated > _TICK_SECONDS:
            _same.add((store.address, name, there[name].version, files[name][1]))
    if once and sum(files[name][0] for name in read) > _WORTH_BYTES:
        with contextlib.suppress(OSError):  # it saves time only
            write_text(record, json.dumps([one for one in _same if one[0] == store.address]))
    return None


def _record_of(address: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "m4" / "verified" / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}.json"


def _read_record(path: Path, address: str) -> list[tuple[str, str, str, str]]:
    """Returns what this machine has compared; [] if the file is not as it was written."""
    try:
        found = [tuple(one) for one in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, RecursionError):
        return []
    return [one for one in found if [*map(type, one)] == [str] * 4 and one[0] == address]


def forget() -> None:
    """Forgets what was compared, so that everything is read again."""
    _same.clear()

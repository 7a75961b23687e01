"""SHA-256 of files, computed when they are written and compared when they are read.

The process chooses how much is compared (`--verify`): "fast" compares sizes and names, "full" the
content. Files that were compared and have not changed since are not read again.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from m4.parallel.platform.hardware import cache_folder
from m4.settings import InputError
from m4.storage.files import read_json, write_json
from m4.storage.objects import Object, Objects
from m4.storage.records import count, entry, listed, named, record, text

# Name -> (size in bytes, SHA-256), and their kind in a manifest.
Files = Mapping[str, Sequence[Any]]
FILES = named(entry(count, text))
# Kind of a machine's record of a folder: name, version and SHA-256 of each file.
_KEPT = record({"files": listed(entry(text, text, text))})
Level = Literal["fast", "full"]
_THREADS = 8
# Seconds within which a changed file may change again in the same tick of its disk's clock.
_TICK_SECONDS = 2.0
# Smaller files are read even if only sizes are compared.
_SMALL_BYTES = 1 << 16
# Below this size, hashing again is cheap.
_WORTH_BYTES = 1 << 24


class Disk:
    """A folder on a disk, where inodes and times are versions of files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.address = os.path.abspath(folder)

    def list(self) -> dict[str, Object]:
        """Returns name -> size, version and time of each file."""
        found = {}
        for folder, _, files in os.walk(self.address):
            for file in files:
                name = Path(folder, file).relative_to(self.address).as_posix()
                with contextlib.suppress(FileNotFoundError):
                    found[name] = self.look(name)
        return found

    def look(self, name: str) -> Object:
        """Returns size, version and time of one file."""
        found = Path(self.address, name).stat()
        # Files are written whole, so a file rewritten within a tick of the clock has another inode.
        return Object(found.st_size, f"{found.st_ino}.{found.st_mtime_ns}", found.st_mtime)

    def sha256(self, name: str) -> tuple[int, str]:
        """Returns a file's size and SHA-256."""
        with Path(self.address, name).open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest


# Files of a folder, by relative names.
Folder = Disk | Objects

_chosen: Level | None = None
_same: set[tuple[str, str, str, str]] = set()  # address, name, version, SHA-256


def choose(level: Level | None) -> None:
    """Sets how much this process compares from now on.

    Without a level, it compares everything but files that this machine has compared before and that
    have not changed since (`problem(once=True)`).
    """
    global _chosen
    _chosen = level


def hashes(store: Folder, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Returns size and SHA-256 of a folder's files, read in several threads."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(store.sha256, names), strict=True))


def problem(
    store: Folder, files: Files, wanted: Callable[[str], bool] = lambda name: True,
    level: Level | None = None, *, once: bool = False,
) -> str | None:  # fmt: skip
    """Describes the first fault in a folder's files, or returns None.

    Args:
        files: Sizes and hashes when written.
        wanted: Test of names: the content of these files is compared, the sizes of all.
        level: How much to compare. Defaults to the process's choice.
        once: Whether the machine records what it has compared, in $XDG_CACHE_HOME/m4/verified, and
            does not read it again.
    """
    there = store.list()
    digest = hashlib.sha256(store.address.encode()).hexdigest()[:16]
    kept = cache_folder() / "verified" / f"{digest}.json"
    if once and _chosen is None:
        with contextlib.suppress(OSError, InputError):  # the record only saves time
            rows = read_json(kept, _KEPT)["files"]
            _same.update((store.address, *row) for row in rows)
    for name, (size, _) in files.items():
        if name not in there:
            return f"{name}: missing"
        if there[name].size != size:
            return f"{name}: {there[name].size:,} bytes of {size:,}"
    full = (level or _chosen) != "fast"
    read = {
        name: seen
        for name, (size, sha256) in files.items()
        if wanted(name)
        and (full or size <= _SMALL_BYTES)
        and (seen := (store.address, name, there[name].version, sha256)) not in _same
    }
    try:
        found = hashes(store, read)
    except FileNotFoundError as error:
        return f"{error.filename or error}: missing"
    for name in read:
        if found[name][1] != files[name][1]:
            return f"{name}: its content is not what was written"
    now = time.time()
    _same.update(read[name] for name in read if now - there[name].updated > _TICK_SECONDS)
    if once and sum(files[name][0] for name in read) > _WORTH_BYTES:
        with contextlib.suppress(OSError):
            write_json(kept, {"files": [one[1:] for one in _same if one[0] == store.address]})
    return None

"""SHA-256 of files: computed when they are written, compared when they are read.

How much is compared is the process's choice (`--verify`): "fast" sizes and names, "full" the
content. What was compared once and has not changed since is not read again.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

from m4.settings import InputError
from m4.storage.store import Object, Store

# Name -> (size in bytes, SHA-256).
Files = Mapping[str, Sequence[Any]]
Level = Literal["fast", "full"]
LEVELS: tuple[str, ...] = get_args(Level)
_THREADS = 8
# Files that changed less long ago may change again within the same tick of their disk's clock.
_TICK_SECONDS = 2.0
# Smaller files are read even where only sizes are compared.
_SMALL_BYTES = 1 << 16


class _Choice:
    level: Level = "full"


_same: set[tuple[str, str, str, str]] = set()  # address, name, version, SHA-256


def choose(level: Level) -> None:
    """How much this process compares from now on."""
    _Choice.level = level


def chosen() -> Level:
    return _Choice.level


def hashes(store: Store, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of a store's files, read by several threads."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _hash(store, name), names), strict=True))


def _hash(store: Store, name: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for piece in store.pieces(name):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


def problem(
    store: Store,
    files: Files,
    wanted: Callable[[str], bool] = lambda name: True,
    level: Level | None = None,
) -> str | None:
    """What is wrong with a folder's files, the first in their order; None: nothing.

    Args:
        files: as they were written. wanted: the names of those whose content counts; sizes are
            compared of all. level: None: the process's choice.
    """
    there = store.list()
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
    _remember(store.address, there, {name: files[name][1] for name in read})
    return None


def _remember(address: str, there: Mapping[str, Object], read: Mapping[str, str]) -> None:
    now = time.time()
    for name, sha256 in read.items():
        if now - there[name].updated > _TICK_SECONDS:
            _same.add((address, name, there[name].version, sha256))


def well_formed(files: Any, where: str) -> Files:
    """`files` as they were read from JSON. InputError: they are something else."""
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(e, list) and [*map(type, e)] == [int, str] for e in entries):
        raise InputError(f"{where}: damaged, not what m4 wrote")
    return files


def forget() -> None:
    """Everything is read again."""
    _same.clear()

"""The manifest of a checkpoint: size and SHA-256 of every file of a step's items.

It is `<step>/sha256/manifest.json`. While a step is written under its temporary name each process
hashes its own files (`ocdbt.process_<i>`), and the primary joins what they found and hashes the
rest. So a step appears with its manifest, or not at all.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from etils import epath

from m4.settings import InputError
from m4.storage import checksums
from m4.storage.checksums import Disk, Folder
from m4.storage.files import read_json
from m4.storage.objects import ERRORS, Object, Objects

ITEM = "sha256"
_NAME = f"{ITEM}/manifest.json"
_OWN = "ocdbt.process_"
# orbax's own file about the step, and what it may hold. It is still changed once the manifest is
# there, so no checksum is of it.
_MARKS = "_CHECKPOINT_METADATA"
_KINDS: Mapping[str, tuple[type, ...]] = {
    "item_handlers": (dict, str),
    "metrics": (dict,),
    "performance_metrics": (dict,),
    "init_timestamp_nsecs": (int,),
    "commit_timestamp_nsecs": (int,),
    "custom_metadata": (dict,),
}
# How often files that are written are looked at.
_DISK_SECONDS = 0.02  # a look takes 0.7 ms; seldom ones leave more to hash after the last write
_BUCKET_SECONDS = 5.0  # it is asked for several lists


def store_of(folder: epath.Path) -> Folder:
    """Returns the files of a folder, on a disk or in a bucket."""
    name = os.fspath(folder)
    return Objects(name) if "://" in name else Disk(name)


class OwnFiles:
    """What this process writes of the step around the folder `item`, before it is whole.

    A thread hashes the files that are complete while others are still written. `finish` hashes the
    rest, and those that have changed since.
    """

    def __init__(self, item: epath.Path, process: int) -> None:
        self._item, self._process = item, process
        self._stores: dict[epath.Path, Folder] = {}
        self._hashed: dict[str, tuple[Object, tuple[int, str]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        period = _BUCKET_SECONDS if "://" in os.fspath(self._item) else _DISK_SECONDS
        while not self._ended.wait(period):
            # A folder appears, or gets its name, at this moment: `finish` looks again.
            with contextlib.suppress(*ERRORS):
                self._look(_open_files, self._one_by_one)

    def _one_by_one(self, store: Folder, names: Iterable[str]) -> dict[str, tuple[int, str]]:
        """Starts no threads: the program may end at any moment."""
        found = {}
        for name in names:
            if not self._ended.is_set():
                found |= checksums.hashes(store, [name], threads=1)
        return found

    def _look(
        self,
        unfinished: Callable[[], set[str]] = set,
        hashes: Callable[[Folder, Iterable[str]], dict[str, tuple[int, str]]] | None = None,
    ) -> list[str]:
        """Hashes what is not hashed as it is now, but for `unfinished`; returns what is there."""
        seen = []
        for item in self._item.parent.iterdir():
            own = item / f"{_OWN}{self._process}"
            if not own.is_dir():
                continue
            if own not in self._stores:
                self._stores[own] = store_of(own)
            there = self._stores[own].list()
            left, real = unfinished(), os.path.realpath(own)
            # Items have temporary names too, where folders can be renamed.
            prefix = f"{item.name.partition('.')[0]}/{own.name}/"
            changed = [
                name
                for name, now in there.items()
                if self._hashed.get(prefix + name, (None,))[0] != now
                and f"{real}/{name}" not in left
            ]
            found = (hashes or checksums.hashes)(self._stores[own], changed)
            for name, entry in found.items():
                self._hashed[prefix + name] = there[name], entry
            seen += [prefix + name for name in there]
        return seen

    def finish(self) -> None:
        """When all files are written: writes what they are."""
        self.end()
        self._thread.join()
        found = {name: self._hashed[name][1] for name in self._look()}
        (self._item / f"process_{self._process}.json").write_text(json.dumps(found))

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()


def _open_files() -> set[str]:
    """The files that this process has open; OSError where the system does not say it."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def write_whole(step: epath.Path) -> None:
    """Joins what the processes found and hashes all other files, when only the step's own name is
    missing."""
    store = store_of(step)
    names = sorted(store.list())
    found: dict[str, tuple[int, str]] = {}
    for name in [name for name in names if name.startswith(f"{ITEM}/process_")]:
        found |= json.loads((step / name).read_text())
        (step / name).unlink()
    # Those of the step itself are orbax's marks, which it still changes.
    others = [n for n in names if n not in found and "/" in n and not n.startswith(f"{ITEM}/")]
    found |= checksums.hashes(store, others)
    (step / _NAME).write_text(json.dumps({"files": dict(sorted(found.items()))}))


def files_of(step: epath.Path) -> checksums.Files:
    """Returns what the manifest of a step says. InputError: it is damaged."""
    return read_json(step / _NAME, lambda found: checksums.well_formed(found["files"], _NAME))


def digest(step: epath.Path) -> str:
    """Returns what a step's files are, in short."""
    return hashlib.sha256(json.dumps(files_of(step), sort_keys=True).encode()).hexdigest()


def items_of(step: epath.Path) -> set[str]:
    """Returns the items of a step."""
    return {PurePosixPath(name).parts[0] for name in files_of(step)}


def problem(
    step: epath.Path, items: Collection[str] | None = None, level: checksums.Level | None = None
) -> str | None:
    """Returns what is wrong with a step's files, or None.

    items: whose content is needed; None: of all.
    """
    if (said := marks_problem(step)) is not None:
        return said
    try:
        files = files_of(step)
    except FileNotFoundError:
        return f"{_NAME}: missing"
    except InputError as error:
        return str(error)
    return checksums.problem(
        store_of(step), files, lambda name: items is None or name.split("/")[0] in items, level
    )


def marks_problem(step: epath.Path) -> str | None:
    """What is wrong with orbax's file about a step; None: nothing, or there is none."""

    def check(found: dict[str, Any]) -> None:
        for name, kinds in _KINDS.items():
            if found.get(name) is not None and not isinstance(found[name], kinds):
                raise TypeError(f"its {name} is {found[name]!r}")

    try:
        read_json(step / _MARKS, check)
    except FileNotFoundError:
        return None
    except InputError as error:
        return str(error)
    return None

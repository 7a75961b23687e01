"""The manifest of a checkpoint: size and SHA-256 of every file of a step's items.

It is `<step>/sha256/manifest.json`. While a step is written under its temporary name each process
hashes its own files (`ocdbt.process_<i>`), and the primary joins what they found and hashes the
rest. So a step appears with its manifest, or not at all.
"""

import json
import os
from collections.abc import Collection
from pathlib import PurePosixPath

from etils import epath

from m4.settings import InputError
from m4.storage import checksums
from m4.storage.files import read_json
from m4.storage.store import Disk, Store, open_store

ITEM = "sha256"
_NAME = f"{ITEM}/manifest.json"
_OWN = "ocdbt.process_"


def store_of(folder: epath.Path) -> Store:
    """The files of a folder, on a disk or in a bucket."""
    name = os.fspath(folder)
    return open_store(name) if "://" in name else Disk(f"file://{name}")


def write_own(item: epath.Path, process: int) -> None:
    """Hashes what this process wrote of the step around the folder `item`, before it is whole."""
    found = {}
    for sibling in item.parent.iterdir():
        # Items have temporary names too, where folders can be renamed.
        own, name = sibling / f"{_OWN}{process}", sibling.name.partition(".")[0]
        if own.is_dir():
            store = store_of(own)
            for file, entry in checksums.hashes(store, store.list()).items():
                found[f"{name}/{own.name}/{file}"] = entry
    (item / f"process_{process}.json").write_text(json.dumps(found))


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


def files_of(step: epath.Path) -> checksums.Files | None:
    """What the manifest says; None: there is none. InputError: it is damaged."""
    try:
        return read_json(step / _NAME, lambda found: checksums.well_formed(found["files"], _NAME))
    except FileNotFoundError:
        return None


def items_of(step: epath.Path) -> set[str]:
    """The items of a step: those of its manifest, or without one the folders that are there."""
    files = files_of(step)
    if files is None:
        return {path.name for path in step.iterdir() if path.is_dir()}
    return {PurePosixPath(name).parts[0] for name in files}


def problem(
    step: epath.Path, items: Collection[str] | None = None, level: checksums.Level | None = None
) -> str | None:
    """What is wrong with a step's files; None: nothing, or it has no manifest.

    items: whose content is needed; None: of all.
    """
    try:
        files = files_of(step)
    except InputError as error:
        return str(error)
    if files is None:
        return None
    return checksums.problem(
        store_of(step), files, lambda name: items is None or name.split("/")[0] in items, level
    )

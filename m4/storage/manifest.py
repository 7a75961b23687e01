"""The manifest of a checkpoint: size and SHA-256 of every file of a step's items.

It is `<step>/sha256/manifest.json`. While a step still has its temporary name each process hashes
its own files (`ocdbt.process_<i>`), and the primary joins what they found and hashes the rest. So a
step appears with its manifest, or not at all.
"""

import hashlib
import json
import os
from collections.abc import Collection

from etils import epath

from m4.settings import InputError
from m4.storage import checksums
from m4.storage.checksums import Disk, Folder
from m4.storage.files import read_json
from m4.storage.objects import Objects
from m4.storage.records import anything, count, named, record

ITEM = "sha256"
_NAME = f"{ITEM}/manifest.json"
_OWN = "ocdbt.process_"
# orbax's own file about the step, and what it may hold. It is still changed once the manifest is
# there, so no checksum is of it.
_MARKS = "_CHECKPOINT_METADATA"
_MARKED = record(
    {
        "item_handlers?": named(anything),
        "metrics?": named(anything),
        "performance_metrics?": named(anything),
        "init_timestamp_nsecs?": count,
        "commit_timestamp_nsecs?": count,
        "custom_metadata?": named(anything),
    }
)


def store_of(folder: epath.Path) -> Folder:
    """Returns the files of a folder, on a disk or in a bucket."""
    name = os.fspath(folder)
    return Objects(name) if "://" in name else Disk(name)


def write_own(item: epath.Path, process: int) -> None:
    """Hashes what a process has written of a step; the manifest's folder `item` gets the hashes."""
    found = {}
    for folder in item.parent.iterdir():
        own = folder / f"{_OWN}{process}"
        if own.is_dir():
            files = store_of(own)
            # Items have temporary names, too, where folders can be renamed.
            prefix = f"{folder.name.partition('.')[0]}/{own.name}/"
            hashes = checksums.hashes(files, files.list())
            found |= {prefix + name: entry for name, entry in hashes.items()}
    (item / f"process_{process}.json").write_text(json.dumps(found))


def write_whole(step: epath.Path) -> None:
    """Joins what the processes found, and hashes all other files."""
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
    return read_json(step / _NAME, record({"files": checksums.FILES}))["files"]


def digest(step: epath.Path) -> str:
    """Returns what a step's files are, in short."""
    return hashlib.sha256(json.dumps(files_of(step), sort_keys=True).encode()).hexdigest()


def items_of(step: epath.Path) -> set[str]:
    """Returns the items of a step."""
    return {name.split("/")[0] for name in files_of(step)}


def problem(
    step: epath.Path, items: Collection[str] | None = None, level: checksums.Level | None = None
) -> str | None:
    """Returns what is wrong with a step's files, or None.

    Args:
        items: Whose content is compared. Defaults to all items.
        level: How much is compared. Defaults to the process's choice.
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
    """Returns what is wrong with orbax's file about a step, or None if it is right or missing."""
    try:
        read_json(step / _MARKS, _MARKED)
    except FileNotFoundError:
        return None
    except InputError as error:
        return str(error)
    return None

"""Steps in a folder of checkpoints: complete, undamaged and damaged ones, and their manifests.

A step's manifest, `<step>/sha256/manifest.json`, has size and SHA-256 of every file of its items.
While the step has its temporary name, each process hashes its own files (`ocdbt.process_<i>`), and
the primary joins the results and hashes the rest. Thus a step and its manifest appear together.
"""

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from etils import epath

from m4.settings import InputError
from m4.storage import checksums
from m4.storage.checksums import Disk, Folder
from m4.storage.files import read_json
from m4.storage.local_copy import address_of
from m4.storage.objects import Objects
from m4.storage.records import anything, count, named, record

ITEM = "sha256"
_NAME = f"{ITEM}/manifest.json"
_OWN = "ocdbt.process_"
# orbax's own file about the step, and its kind. orbax changes it after the manifest is written, so
# it has no checksum.
_MARKS = "_CHECKPOINT_METADATA"
_OBJECTS = ("item_handlers?", "metrics?", "performance_metrics?", "custom_metadata?")
_TIMES = ("init_timestamp_nsecs?", "commit_timestamp_nsecs?")
_MARKED = record({**dict.fromkeys(_OBJECTS, named(anything)), **dict.fromkeys(_TIMES, count)})


def complete_steps(folder: Path) -> list[int]:
    """Returns the complete steps in a folder of checkpoints, ascending, without reading them."""
    there = address_of(folder)
    if not there.is_dir():
        return []
    steps = [path for path in there.iterdir() if path.name.isdecimal()]
    if "://" in os.fspath(there):  # a bucket cannot rename, so orbax marks complete steps
        steps = [path for path in steps if (path / "commit_success.txt").exists()]
    return sorted(int(path.name) for path in steps)


def damaged_steps(folder: Path) -> list[epath.Path]:
    """Returns the damaged steps that were moved aside."""
    there = address_of(folder)
    return sorted(there.glob("*.damaged*")) if there.is_dir() else []


def latest_step(folder: Path) -> int | None:
    """Returns the last complete step in a folder of checkpoints, or None, without reading it."""
    return max(complete_steps(folder), default=None)


def is_removed(folder: Path, step: int, seconds: float) -> bool:
    """Returns whether a step disappears within some seconds, as removal takes a while."""
    until = time.monotonic() + seconds
    while step in complete_steps(folder):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


def used_item(items: Collection[str]) -> str:
    """Returns the item with the parameters to use: best, average or params."""
    return next((name for name in ("best", "average") if name in items), "params")


def whole_step(
    folder: Path, step: int | None = None, *, used: bool = False, move_aside: bool = False
) -> int | None:
    """Returns the last undamaged step, or None if there is no step.

    For each damaged step after it, a line on stderr names the damaged file.

    Args:
        step: Step to check. Defaults to all, from the last one on.
        used: Whether to check only the parameters to use and the note.
        move_aside: Whether to rename damaged steps to `<step>.damaged`, for a job that writes.

    Raises:
        InputError: No step is undamaged, the given one is missing or damaged, or the job would
            have to remove a link.
    """
    there, damaged = address_of(folder), dict[int, str]()
    wanted = (lambda items: {used_item(items), "note"}) if used else set
    if step is not None:
        _check_there(folder, step)
        if (said := problem(there / str(step), wanted)) is not None:
            _check_there(folder, step)
            raise InputError(f"{there}/{step}: damaged ({said})")
        return step
    for path in sorted(folder.iterdir()) if move_aside and folder.is_dir() else ():
        if path.name.isdecimal() and path.is_symlink():  # orbax could not remove it later
            said = "training removes old steps: put the folder there, or remove the link"
            raise InputError(f"{path}: a link to {path.readlink()}; {said}")
    while True:
        # Steps are listed again each time, as training removes and adds some.
        steps = [one for one in complete_steps(folder) if one not in damaged]
        found = max(steps, default=None)
        if found is None or (said := problem(there / str(found), wanted)) is None:
            break
        damaged[found] = said
    steps = complete_steps(folder)
    if move_aside:  # a job that writes lets orbax read its file about each step
        marks = {one: _marks_problem(there / str(one)) for one in steps}
        damaged |= {one: said for one, said in marks.items() if said is not None}
    damaged = {one: damaged[one] for one in steps if one in damaged}
    if found is None and damaged:
        each = "; ".join(f"{one} is damaged ({damaged[one]})" for one in sorted(damaged)[::-1])
        remedy = "bring the files of one back, or start over with --fresh"
        raise InputError(f"{there}: no checkpoint is whole; {each}; {remedy}")
    for one, said in damaged.items():
        moved = f" and now {_moved_aside(there / str(one)).name}" if move_aside else ""
        _warn(f"{there}/{one}: damaged ({said}){moved}; step {found} is used")
    return found


def _check_there(folder: Path, step: int) -> None:
    if step not in (steps := complete_steps(folder)):
        listed = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        raise InputError(f"{address_of(folder)}: no checkpoint of step {step}; {listed}")


@functools.cache
def _warn(line: str) -> None:
    """Prints a line on stderr once per process, as a job looks for its step several times."""
    print(line, file=sys.stderr)


def _moved_aside(step: epath.Path) -> epath.Path:
    target, number = step.with_name(f"{step.name}.damaged"), 1
    while target.exists():
        number += 1
        target = step.with_name(f"{step.name}.damaged.{number}")
    return step.rename(target)


def write_own(item: epath.Path, process: int) -> None:
    """Hashes the files of a step that a process wrote, into the manifest's folder `item`."""
    found = {}
    for folder in item.parent.iterdir():
        own = folder / f"{_OWN}{process}"
        if own.is_dir():
            # Where folders can be renamed, items have temporary names, too.
            prefix = f"{folder.name.partition('.')[0]}/{own.name}/"
            hashes = checksums.hashes(_store_of(own), _store_of(own).list())
            found |= {prefix + name: entry for name, entry in hashes.items()}
    (item / f"process_{process}.json").write_text(json.dumps(found))


def write_whole(step: epath.Path) -> None:
    """Joins the processes' hashes, and hashes all other files."""
    names, found = sorted(_store_of(step).list()), dict[str, tuple[int, str]]()
    for name in [name for name in names if name.startswith(f"{ITEM}/process_")]:
        found |= json.loads((step / name).read_text())
        (step / name).unlink()
    # Files at the top of the step are orbax's marks, which it still changes.
    others = [n for n in names if n not in found and "/" in n and not n.startswith(f"{ITEM}/")]
    found |= checksums.hashes(_store_of(step), others)
    (step / _NAME).write_text(json.dumps({"files": dict(sorted(found.items()))}))


def files_of(step: epath.Path) -> checksums.Files:
    """Returns the content of a step's manifest. Raises InputError if it is damaged."""
    return read_json(step / _NAME, record({"files": checksums.FILES}))["files"]


def items_of(step: epath.Path) -> set[str]:
    """Returns the items of a step."""
    return {name.split("/")[0] for name in files_of(step)}


def digest(folder: Path, step: int) -> str:
    """Returns the SHA-256 of the content of a step's manifest."""
    files = files_of(address_of(folder) / str(step))
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def problem(
    step: epath.Path,
    wanted: Callable[[set[str]], set[str]] = set,
    level: checksums.Level | None = None,
) -> str | None:
    """Describes what is wrong with a step's files, or returns None.

    Args:
        wanted: Items whose content to compare. Defaults to all.
        level: How much to compare. Defaults to the process's choice.
    """
    if (said := _marks_problem(step)) is not None:
        return said
    try:
        files = files_of(step)
    except FileNotFoundError:
        return f"{_NAME}: missing"
    except InputError as error:
        return str(error)
    items = wanted({name.split("/")[0] for name in files})
    return checksums.problem(
        _store_of(step), files, lambda name: name.split("/")[0] in items, level
    )


def _store_of(folder: epath.Path) -> Folder:
    name = os.fspath(folder)
    return Objects(name) if "://" in name else Disk(name)


def _marks_problem(step: epath.Path) -> str | None:
    """Describes what is wrong with orbax's file about a step, or returns None."""
    try:
        read_json(step / _MARKS, _MARKED)
    except FileNotFoundError:
        pass
    except InputError as error:
        return str(error)
    return None

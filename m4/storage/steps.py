"""The steps in a folder of checkpoints: complete ones, whole ones, damaged ones."""

import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

from etils import epath

from m4.settings import InputError
from m4.storage import manifest
from m4.storage.local_copy import address_of


def complete_steps(folder: Path) -> list[int]:
    """Returns the complete steps in a folder of checkpoints, ascending; reads none of them."""
    return _complete(address_of(folder))


def _complete(there: epath.Path) -> list[int]:
    if not there.is_dir():
        return []
    steps = [path for path in there.iterdir() if path.name.isdecimal()]
    if "://" in os.fspath(there):  # a bucket cannot rename, so orbax marks a step
        steps = [path for path in steps if (path / "commit_success.txt").exists()]
    return sorted(int(path.name) for path in steps)


def damaged_steps(folder: Path) -> list[epath.Path]:
    """Returns the steps that were moved aside."""
    there = address_of(folder)
    return sorted(there.glob("*.damaged*")) if there.is_dir() else []


def latest_step(folder: Path) -> int | None:
    """Returns the last complete step in a folder of checkpoints, or None; reads none of them."""
    return max(complete_steps(folder), default=None)


def digest(folder: Path, step: int) -> str:
    """Returns what a step's files are, in short: the SHA-256 of its manifest."""
    return manifest.digest(address_of(folder) / str(step))


def whole_step(
    folder: Path, step: int | None = None, *, used: bool = False, move_aside: bool = False
) -> int | None:
    """Returns the last step whose files are as they were written, or None if there is no step.

    For each damaged step after it, a line on stderr names the file.

    Args:
        step: The step to look at. Defaults to all, from the last one on.
        used: Whether only the parameters to use and the note must be whole.
        move_aside: Whether damaged steps become `<step>.damaged`, for the job that writes there.

    Raises:
        InputError: No step is whole; the given one is not there, or damaged; the job would have to
            remove a link.
    """
    there, damaged = address_of(folder), dict[int, str]()
    if move_aside:
        _check_removable(folder)
    if step is not None:
        _check_there(there, step)
    while True:
        # Looked for again each time: training removes steps, and adds newer ones.
        steps = [one for one in _complete(there) if one not in damaged]
        found = max(steps, default=None) if step is None else step
        if found is None:
            break
        said = _problem(there / str(found), used)
        if said is None:
            break
        damaged[found] = said
        if step is not None:
            _check_there(there, step)
            raise InputError(f"{there}/{step}: damaged ({said})")
    steps = _complete(there)
    if move_aside:  # whoever writes there has orbax read its file about each step
        marks = {one: manifest.marks_problem(there / str(one)) for one in steps}
        damaged |= {one: said for one, said in marks.items() if said is not None}
    damaged = {one: damaged[one] for one in steps if one in damaged}
    if found is None and damaged:
        each = "; ".join(f"{one} is damaged ({damaged[one]})" for one in sorted(damaged)[::-1])
        raise InputError(
            f"{there}: no checkpoint is whole; {each}; bring the files of one back, or start over "
            "with --fresh"
        )
    for one, said in damaged.items():
        moved = f" and now {_moved_aside(there / str(one)).name}" if move_aside else ""
        _warn(f"{there}/{one}: damaged ({said}){moved}; step {found} is used")
    return found


def _check_removable(folder: Path) -> None:
    """Raises InputError for a step that is a link, which orbax cannot remove when it is old."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.isdecimal() and path.is_symlink():
            raise InputError(
                f"{path}: a link to {path.readlink()}; training removes old steps: put the step's "
                "folder there, or remove the link"
            )


_warned: set[str] = set()


def _warn(line: str) -> None:
    """Prints a line on stderr, once a process: a job looks for its step several times."""
    if line not in _warned:
        _warned.add(line)
        print(line, file=sys.stderr)


def is_removed(folder: Path, step: int, seconds: float) -> bool:
    """Returns whether a step goes within some seconds: to remove it takes a while."""
    until = time.monotonic() + seconds
    while step in complete_steps(folder):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


def _check_there(there: epath.Path, step: int) -> None:
    steps = _complete(there)
    if step not in steps:
        listed = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        raise InputError(f"{there}: no checkpoint of step {step}; {listed}")


def _problem(step: epath.Path, used: bool) -> str | None:
    try:
        items = {used_item(manifest.items_of(step)), "note"} if used else None
    except (InputError, UnicodeDecodeError, FileNotFoundError) as error:
        return str(error)
    return manifest.problem(step, items)


def _moved_aside(step: epath.Path) -> epath.Path:
    target = step.with_name(f"{step.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = step.with_name(f"{step.name}.damaged.{number}")
    return step.rename(target)


def used_item(items: Collection[str]) -> str:
    """Returns the item whose parameters are used: best, average or params."""
    return next((name for name in ("best", "average") if name in items), "params")

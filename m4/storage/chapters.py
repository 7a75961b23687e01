"""The chapters of a run: from which step on which config holds (`m4 train --new_chapter`).

run.json lists them under "chapters"; a run whose config never changed has one, which is not listed.
What the others left is in chapters/<number>/: run.json, config.gin and operative_config.gin as they
were at the chapter's end, and the vocabulary where the next chapter's has grown.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m4.storage import run_folder
from m4.storage.files import whole

FILES = ("run.json", "config.gin", "operative_config.gin")
FOLDER = "chapters"
VOCABULARY = "vocabulary"  # the folder of what the present model needs of its corpus
_FIRST = {"chapter": 1, "step": 0, "reason": None, "changes": {}, "text": []}


def listed(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chapters of what run.json holds, the last one is the present one: "chapter", its number
    from 1; "step", that it began after; "time", "reason"; "changes", setting -> [before, now];
    "text", what changed in the corpus; "vocabulary_from", the folder of the vocabulary that this
    one's grew from; "optimizer", what became of its state."""
    return [*record.get("chapters", [_FIRST])]


def of_run(folder: Path) -> list[dict[str, Any]]:
    """The chapters of a run's folder; of one without run.json, where no config was claimed yet, the
    first."""
    there = (folder / "run.json").is_file()
    return listed(run_folder.read(folder) if there else {})


def at(folder: Path, step: int) -> int:
    """The number of the chapter that a checkpoint of a step is in."""
    known = of_run(folder)
    return max((one["chapter"] for one in known if one["step"] < step), default=1)


def ended(folder: Path, number: int) -> Path:
    """What a chapter left that has ended."""
    return folder / FOLDER / str(number)


def keep(folder: Path, number: int) -> None:
    """Keeps what the present chapter, of this number, leaves."""
    for name in FILES:
        if (folder / name).is_file():
            copy(folder / name, ended(folder, number))


def copy(path: Path, to: Path) -> None:
    """A file into a folder: whole or not at all."""
    with whole(to / path.name) as part:
        shutil.copyfile(path, part)


def vocabulary(folder: Path, step: int) -> Path | None:
    """The folder with the vocabulary that a checkpoint was trained with, where a later chapter's
    has grown from it; None: it is the present one."""
    known = of_run(folder)
    there = (ended(folder, number) for number in range(at(folder, step), known[-1]["chapter"]))
    return next((one for one in there if (one / "manifest.json").is_file()), None)


def operative_config(folder: Path, number: int) -> Path:
    """The operative config of a chapter."""
    present = of_run(folder)[-1]["chapter"] == number
    return (folder if present else ended(folder, number)) / "operative_config.gin"

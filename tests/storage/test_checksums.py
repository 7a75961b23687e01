"""The files that are read and hashed again, and those known to be as they were."""

import os
import time
from pathlib import Path

import pytest

from m4.storage import checksums
from m4.storage.checksums import Disk, Level

NAMES = ("small", "a/large")
SIZES = {"small": 10, "a/large": checksums._SMALL_BYTES + 1}


def files_in(folder: Path) -> checksums.Files:
    """Writes two files long ago, and returns their checksums."""
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * SIZES[name])
        set_time(path, time.time_ns() - 10**12)
    checksums._same.clear()
    return checksums.hashes(Disk(folder), NAMES)


def set_time(path: Path, nanoseconds: int) -> None:
    os.utime(path, ns=(nanoseconds, nanoseconds))


def change(path: Path, nanoseconds: int) -> None:
    """Flips a bit in place, so that the file has the same inode and size and this time."""
    with path.open("r+b") as file:
        file.seek(5)
        file.write(b"y")
    set_time(path, nanoseconds)


@pytest.mark.parametrize(
    ("level", "name", "seen"),
    [
        ("full", "small", True),
        ("full", "a/large", True),
        ("fast", "small", True),  # it is read in less time than it takes to ask whether it was
        ("fast", "a/large", False),
    ],
)
def test_a_small_file_is_hashed_at_every_level(
    level: Level, name: str, seen: bool, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    change(tmp_path / name, time.time_ns())
    said = checksums.problem(Disk(tmp_path), files, level=level)
    assert said == (f"{name}: its content is not what was written" if seen else None)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_hashed_again_if_its_time_changed_by_a_nanosecond(
    name: str, tmp_path: Path
) -> None:
    files, disk, path = files_in(tmp_path), Disk(tmp_path), tmp_path / name
    assert checksums.problem(disk, files) is None
    before = path.stat().st_mtime_ns
    change(path, before)
    assert checksums.problem(disk, files) is None  # what a time is trusted to say
    set_time(path, before + 1)
    assert checksums.problem(disk, files) == f"{name}: its content is not what was written"


@pytest.mark.parametrize(("seconds", "seen"), [(0.1, True), (60, False)])
def test_a_file_that_changed_just_before_it_was_hashed_is_hashed_again(
    seconds: float, seen: bool, tmp_path: Path
) -> None:
    """A later change may fall on the same tick of the disk's clock."""
    files, disk, path = files_in(tmp_path), Disk(tmp_path), tmp_path / "a/large"
    at = time.time_ns() - int(seconds * 1e9)
    set_time(path, at)
    assert checksums.problem(disk, files) is None
    change(path, at)
    assert (checksums.problem(disk, files) is not None) == seen

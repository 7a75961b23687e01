"""A token cache that is not as it was built is never trained on: one line names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m4.data.cache.cache import Cache, Damaged
from m4.data.corpus import CorpusSpec
from m4.storage import checksums
from tests.data.corpus import Made

SPEC = {"vocabulary_size": 400, "lengths": {"inputs": 96, "targets": 96}}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CorpusSpec(Made({"gl": 60}), **SPEC).build(tmp_path_factory.mktemp("built")).folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "data" / built.name))


TOKENS, OFFSETS = "train.tokens.00000.npy", "train.offsets.00000.npy"


def set_at(name: str, position: int, value: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        array = np.load(folder / name)
        array[position] = value
        np.save(folder / name, array)

    return damage


def flipped(name: str) -> Callable[[Path], object]:
    """A bit in the middle of a file."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "an offset of 2**30": set_at(OFFSETS, 3, 2**30),
    "an id as high as the vocabulary's size": set_at(TOKENS, 5, 400),
    "half a file": lambda folder: (folder / OFFSETS).write_bytes(
        (folder / OFFSETS).read_bytes()[:300]
    ),
    "a file that is missing": lambda folder: (folder / TOKENS).unlink(),
    "a bit of the ids": flipped(TOKENS),
    "a bit of the vocabulary": flipped("vocabulary.model"),
    "a bit of a test sentence": flipped("text/test.gl.txt"),
    "a bit of the subsets": flipped("text/test.gl.subsets.json"),
    "another number in the manifest": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"pairs": 60', '"pairs": 59')
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_named_in_one_line(folder: Path, what: str) -> None:
    Cache(folder).verify()
    DAMAGE[what](folder)
    with pytest.raises(Damaged, match=r"data/\w+: damaged: \S+: ?.*; remove that folder") as said:
        Cache(folder).verify()
    assert "\n" not in str(said.value)
    with pytest.raises(Damaged):
        CorpusSpec(Made({"gl": 60}), **SPEC).build(folder.parent)


def test_only_what_is_needed_is_compared(folder: Path) -> None:
    DAMAGE["a bit of a test sentence"](folder)
    Cache(folder).verify(lambda name: name.startswith("train."))
    with pytest.raises(Damaged):
        Cache(folder).verify(lambda name: name.startswith("text/"))


def test_a_machine_compares_a_large_corpus_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(checksums, "_WORTH_BYTES", 0)
    monkeypatch.setattr(checksums, "_TICK_SECONDS", -1.0)
    read: list[str] = []
    hash_ = checksums.Disk.sha256
    monkeypatch.setattr(
        checksums.Disk, "sha256", lambda disk, name: (read.append(name), hash_(disk, name))[1]
    )
    looks: list[tuple[int, checksums.Level | None]] = [(1, None), (1, None), (2, "full")]
    for times, level in looks:
        checksums.forget()
        checksums.choose(level)
        Cache(folder).verify()
        assert read.count(TOKENS) == times, level
    checksums.choose(None)
    DAMAGE["a bit of the ids"](folder)
    with pytest.raises(Damaged):
        Cache(folder).verify()

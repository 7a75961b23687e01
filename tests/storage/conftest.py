"""A bucket, and machines that work in it."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from m4.storage import locks
from tests.bucket import BUCKET, Emulator, emulated

# Annotations of fixtures.
Machine = Callable[[], Path]
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]

_number = itertools.count()


@pytest.fixture(scope="session")
def _emulator() -> Iterator[Emulator]:
    """Yields one emulator for the process, as clients keep the first address that they see."""
    with pytest.MonkeyPatch.context() as patch, emulated() as (emulator, environment):
        for name, value in environment.items():
            patch.setenv(name, value)
        yield emulator


@pytest.fixture
def emulator(_emulator: Emulator, monkeypatch: Patch) -> Iterator[Emulator]:
    monkeypatch.setattr(locks, "PERIOD_SECONDS", 0.3)
    _emulator.reset()
    yield _emulator
    _emulator.reset()


@pytest.fixture
def address(emulator: Emulator, machine: Machine) -> str:
    """Returns a folder in the bucket that no other test uses and that has no local copy."""
    machine()
    return f"gs://{BUCKET}/runs/{next(_number)}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: Patch) -> Machine:
    """Makes the test continue as another machine; returns the folder of its copies."""

    def another() -> Path:
        home = tmp_path / f"machine{next(_number)}"
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        return home

    return another


def folder_of(address: str) -> str:
    return address.removeprefix(f"gs://{BUCKET}/")


def config_of(
    settings: Mapping[str, str], text: str = "", mutable: Collection[str] = (), operative: str = ""
) -> dict[str, Any]:
    """Returns the arguments of `run_folder.claim` for a config of a few settings."""
    texts = {"config.gin": text, "operative_config.gin": operative}
    return {"settings": settings, "mutable": mutable, "modules": {}, "texts": texts}

"""A bucket, and a disk in a bucket's place, for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from m4.storage import lease, remote
from tests.bucket import Emulator, emulated


@pytest.fixture(scope="session")
def _emulator() -> Iterator[Emulator]:
    """One for all tests of the process: clients keep the address that they have seen first."""
    with pytest.MonkeyPatch.context() as patch, emulated() as (emulator, environment):
        for name, value in environment.items():
            patch.setenv(name, value)
        yield emulator


@pytest.fixture
def emulator(_emulator: Emulator) -> Iterator[Emulator]:
    _emulator.reset()
    yield _emulator
    _emulator.reset()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder on a disk; working copies have a home that is the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 0.05)
    return tmp_path / "store" / "run"


@pytest.fixture
def here(store: Path) -> Path:
    """This machine's working copy of it."""
    return remote.local(f"file://{store}")

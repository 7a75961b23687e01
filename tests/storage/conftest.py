"""A bucket for the tests of this folder."""

from collections.abc import Iterator

import pytest

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

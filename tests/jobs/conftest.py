"""Runs that the tests of jobs on checkpoints read."""

import shutil
from pathlib import Path

import pytest

from tests.shared import every_step, tiny_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a read-only run of three steps, with all its checkpoints."""
    return every_step(tmp_path_factory)


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a read-only run of four steps, with checkpoints of steps 2 and 4."""
    return tiny_run(tmp_path_factory)


@pytest.fixture(scope="module")
def own(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the run of four steps that a file's tests may change."""
    return Path(shutil.copytree(first, tmp_path_factory.mktemp("own") / "run"))

"""Runs that the tests of jobs on checkpoints read."""

import shutil
from pathlib import Path

import pytest

from tests.shared import every_step, tiny_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that has all its checkpoints; read-only."""
    return every_step(tmp_path_factory)


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, with checkpoints of step 2 and 4; read-only."""
    return tiny_run(tmp_path_factory)


@pytest.fixture(scope="module")
def own(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of four steps as a file's tests may change it."""
    return Path(shutil.copytree(first, tmp_path_factory.mktemp("own") / "run"))

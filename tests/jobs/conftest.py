"""A run that the tests of jobs on checkpoints read."""

from pathlib import Path

import pytest

from tests.command_line import TINY, m4


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that has all its checkpoints; read-only."""
    folder = tmp_path_factory.mktemp("steps") / "run"
    keep = [f"--gin.experiment.Training.{name}" for name in
            ("checkpoint_period=1", "keep_checkpoints=9", "dev_period=9")]  # fmt: skip
    said = m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", *keep, "--gin.TRAIN_STEPS=3")
    assert said.status == 0, said.err
    return folder

"""The run that others begin from."""

from pathlib import Path

import pytest

from tests.command_line import TINY, m4


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, with checkpoints of step 2 and 4; read-only."""
    folder = tmp_path_factory.mktemp("first") / "run"
    said = m4("train", f"--gin_file={TINY}", f"--model_dir={folder}")
    assert said.status == 0, said.err
    return folder

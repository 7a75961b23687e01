"""Fixtures of the tests of scripts; none reaches the cloud or this user's home."""

from pathlib import Path

import pytest

from tests.documents.commands import write_program
from tests.scripts.cloud import CLOUD

# The head of an experiment.toml: all that every one has, but for `baselines` and `[runs]`.
ASKED = """
number = "E0"
title = "made up"
claim = "c"
paper = "p"
paper_result = "r"
verdict = "open"
why = "w"
corpus = "t"
machine = "m"
command = "run {}"
"""


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes programs of these names that only note their calls, in `calls`."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in CLOUD:
        write_program(folder / name, f'echo {name} "$@" >>"{folder}/calls"')
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder

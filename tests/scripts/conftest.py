"""No test of a script reaches the cloud or this user's home."""

from pathlib import Path

import pytest

from tests.scripts.cloud import CLOUD, make_program


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of that name that only say that they were called, in `calls`."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in CLOUD:
        make_program(folder / name, f'echo {name} "$@" >>"{folder}/calls"')
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder

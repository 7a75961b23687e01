"""The Makefile's set-up: what it installs, and when it does so again."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPU, GPU = "requirements.lock", "requirements-cuda.lock"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes the files that set-up reads, and a uv that only notes its arguments."""
    for name in ("Makefile", CPU, GPU, "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\nmkdir -p .venv\necho "$@" >> calls\n')
    uv.chmod(0o755)
    return tmp_path


def installed(folder: Path, *arguments: str) -> list[str] | None:
    """Returns the locks that `make setup ARGUMENTS` installs, or None if nothing is to do."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "CUDA"))}
    subprocess.run(
        ["make", "--silent", "setup", *arguments], cwd=folder, env={**environment, "PATH": path},
        check=True,
    )  # fmt: skip
    if not calls.exists():
        return None
    (sync,) = (line for line in calls.read_text().splitlines() if line.startswith("pip sync"))
    return [word for word in sync.split() if word.endswith(".lock")]


def test_cuda_stays_until_it_is_taken_out(folder: Path) -> None:
    assert installed(folder) == [CPU]
    assert installed(folder) is None
    assert installed(folder, "CUDA=1") == [CPU, GPU]
    # `make demo` or `make test` without CUDA=1 must not put the GPU out of use.
    assert installed(folder) is None
    assert installed(folder, "CUDA=0") == [CPU]
    assert installed(folder) is None


def test_a_changed_lock_is_installed_again(folder: Path) -> None:
    assert installed(folder, "CUDA=1") == [CPU, GPU]
    later = (folder / ".venv" / ".locked-cuda").stat().st_mtime + 10
    os.utime(folder / GPU, (later, later))
    assert installed(folder) == [CPU, GPU]
    assert installed(folder, "CUDA=0") == [CPU]
    assert installed(folder) is None  # the other lock does not matter now

"""A handful of trials of each kind: CI's; `make chaos` runs hundreds (docs/robustness.md)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.every_part
def test_nothing_is_lost_and_nothing_is_silently_wrong(tmp_path: Path) -> None:
    counts = "--kills=5 --damages=8 --disks=1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *counts.split(), f"--folder={tmp_path}"], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

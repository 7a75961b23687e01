"""A handful of trials of each kind: CI's; `make chaos` runs hundreds (docs/robustness.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.every_part
def test_nothing_is_lost_and_nothing_is_silently_wrong(tmp_path: Path) -> None:
    # One of two processes lost: tests/train/loop/test_processes.py; broken lines: test_lines.py.
    counts = "--kills=4 --damages=8 --programs=1 --disks=1 --clocks=1 --losses=0 --lines=0"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *counts.split(), f"--folder={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

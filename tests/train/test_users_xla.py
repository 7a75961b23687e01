"""All other tests compile at XLA's lowest optimization: one run compiles as users' runs do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m4.storage.metrics_log import read_metrics
from tests.command_line import TINY


def run(folder: Path, environment: dict[str, str]) -> list[dict[str, float]]:
    """`m4 train` of the tiny config in a process with one device; its rows."""
    command = [sys.executable, "-m", "m4", "train", f"--gin_file={TINY}", f"--model_dir={folder}"]
    environment = {**environment, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder)


def test_losses_at_the_users_level_are_those_of_the_tests(tmp_path: Path) -> None:
    """Sums in another order, rounded to float32: 4 steps stay within 1e-5 of each other."""
    lowest = run(tmp_path / "lowest", dict(os.environ))
    assert "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]
    # The same corpus is not built again.
    trained = shutil.ignore_patterns("checkpoints", "metrics.jsonl", "atlas.train.json")
    shutil.copytree(tmp_path / "lowest", tmp_path / "users", ignore=trained)
    without = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    users = run(tmp_path / "users", without)
    assert [row["step"] for row in users] == [row["step"] for row in lowest]
    for ours, theirs in zip(lowest, users, strict=True):
        for name in ("loss", "nll", "gradient_norm", "auxiliary_loss", "dev/nll"):
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5), (ours["step"], name)
    assert any("dev/nll" in row for row in users)

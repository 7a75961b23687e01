"""All other tests compile at XLA's lowest optimization: one run compiles as users' runs do.

It has one device, as a laptop; theirs have eight.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m4.storage.metrics_log import read_metrics
from tests.command_line import ALONE, TINY
from tests.shared import tiny_run


@pytest.mark.thorough
def test_losses_at_the_users_level_are_those_of_the_tests(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sums in another order, rounded to float32: 4 steps stay within 1e-5 of each other."""
    made = tiny_run(tmp_path_factory)
    lowest = read_metrics(made)
    assert "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]
    command = [sys.executable, "-m", "m4", "train", f"--gin_file={TINY}", f"--model_dir={tmp_path}"]
    command.append(f"--gin.experiment.Data.data_dir='{made}/data'")  # the same, not built again
    without = {name: value for name, value in ALONE.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    users = read_metrics(tmp_path)
    assert [row["step"] for row in users] == [row["step"] for row in lowest]
    for ours, theirs in zip(lowest, users, strict=True):
        for name in ("loss", "nll", "gradient_norm", "auxiliary_loss", "dev/nll"):
            if name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5), (ours["step"], name)
    assert any("dev/nll" in row for row in users)

"""Jobs that read a run while another process trains it: none waits, none is refused."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m4.storage.steps import latest_step
from tests.command_line import TINY, m4

# One device, as on a machine without an accelerator.
ALONE = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}


@pytest.mark.slow
@pytest.mark.thorough
def test_readers_work_next_to_a_training_process(tmp_path: Path) -> None:
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("3 weeks ago\nlast Monday\n", encoding="utf-8")
    keep = ("checkpoint_period=20", "keep_checkpoints=100000", "log_period=20", "dev_period=100000")
    training = [sys.executable, "-m", "m4", "train", f"--gin_file={TINY}", f"--model_dir={run}",
                "--gin.TRAIN_STEPS=1000000",
                *(f"--gin.experiment.Training.{name}" for name in keep)]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(training, env=ALONE, stdout=log, stderr=subprocess.STDOUT)

    def trained_to(step: int) -> None:
        while (latest_step(run / "checkpoints") or 0) < step:
            assert job.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
            time.sleep(0.05)

    try:
        trained_to(40)
        kept = {name: (run / name).read_bytes() for name in ("run.json", "config.gin")}
        for name, *more in (
            ("score", "--split=dev"),
            ("decode", f"--input={text}", "--to=gl", f"--output={tmp_path / 'gl.txt'}"),
            ("average", "--steps=20,40", f"--output={tmp_path / 'mean'}"),
            ("eval", "--step=40"),
            ("translate", "--to=gl", "3 weeks ago"),
            ("watch", "--once"),
            ("atlas",),
            ("data", "preview"),
        ):
            said = m4(name, *more, f"--model_dir={run}")
            assert said.status == 0, (name, said.err)
            trained_to((latest_step(run / "checkpoints") or 0) + 1)  # it trains on
        assert {name: (run / name).read_bytes() for name in kept} == kept
        assert len((tmp_path / "gl.txt").read_text(encoding="utf-8").splitlines()) == 2
        assert (run / "decodes" / "logprob-dev.en-gl.jsonl").is_file()
        assert latest_step(tmp_path / "mean" / "checkpoints") == 40
    finally:
        job.terminate()
        status = job.wait()
    assert status == 130, (tmp_path / "log").read_text(encoding="utf-8")

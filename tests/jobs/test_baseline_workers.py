"""The pool of processes that train bilingual baselines: signals, and how its processes end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m4.jobs.bilingual import training as bilingual
from m4.storage.files import read_jsonl
from m4.storage.steps import latest_step
from m4.train.loop import Interrupted
from m4.train.preemption import stop_signals
from tests.command_line import TINY
from tests.descendants import descendants


def train_until_stopped(one: Any) -> tuple[str, int]:
    """A worker's task whose training is a loop that saves when a signal comes."""

    def train_one(one: Any, *_: Any) -> tuple[str, int]:
        folder = Path(one.folder)
        folder.mkdir()
        with stop_signals() as received:
            (folder / "started").touch()
            while not received:
                time.sleep(0.05)
            time.sleep(0.5)
            (folder / "saved").touch()
        raise Interrupted(7)

    bilingual.train_one = train_one
    return bilingual.train_in_worker(one)


POOL = """
import sys
from pathlib import Path
from types import SimpleNamespace
from m4.jobs.bilingual import training
from m4.parallel.platform import signals
from m4.progress import ProgressBar
from tests.jobs.test_baseline_workers import train_until_stopped

if __name__ == "__main__":
    signals.install()
    signals.watch()
    training.train_in_worker = train_until_stopped
    folders = [Path(sys.argv[1]) / name for name in ("gl", "de", "es")]
    plans = [SimpleNamespace(folder=folder, language=folder.name) for folder in folders]
    shown = training.Progress({folder.name: 9 for folder in folders})
    try:
        training._train_in_workers(plans, shown, ProgressBar("baselines", 27), 2)
    except signals.Stopped as stopped:
        sys.exit(stopped.status)
"""


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.thorough),  # as a terminal sends it
    ],
)
def test_workers_save_and_end_with_their_parent(
    tmp_path: Path, number: signal.Signals, whole_group: bool
) -> None:
    program, kept = tmp_path / "pool.py", tmp_path / "kept"
    program.write_text(POOL)
    kept.mkdir()
    mark = {"M4_TEST": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, str(program), str(kept)], env={**os.environ, **mark}, process_group=0
    )
    try:
        wait_until(lambda: len(list(kept.glob("*/started"))) == 2)
        assert len(descendants(tmp_path)) >= 3
        (os.killpg if whole_group else os.kill)(parent.pid, number)
        assert parent.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not descendants(tmp_path))
        saved = sorted(path.parent.name for path in kept.glob("*/saved"))
        assert saved == ([] if number == signal.SIGKILL else ["de", "gl"])
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.slow
@pytest.mark.thorough
def test_baselines_that_are_stopped_resume_from_that_step(tmp_path: Path) -> None:
    """The whole job: no checkpoint is due for a long time, and SIGTERM makes one of each."""
    steps = "--gin.bilingual/experiment.Training.total_steps=100000"
    period = "--gin.bilingual/experiment.Training.log_period=1"
    words = ["baselines", f"--gin_file={TINY}", f"--model_dir={tmp_path / 'run'}", steps, period]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "M4_TEST": str(tmp_path)}
    never = "--gin.bilingual/early_stopping.EarlyStopping.patience=100000"
    job = subprocess.Popen([sys.executable, "-m", "m4", *words, never], env=environment)
    kept = tmp_path / "run" / "baselines"

    def trained() -> dict[str, int]:
        rows = {path.parent: read_jsonl(path) for path in kept.glob("*/metrics.jsonl")}
        return {folder.name: found[-1]["step"] for folder, found in rows.items() if found}

    try:
        wait_until(lambda: trained() and min(trained().values()) > 3, seconds=300)
        job.terminate()
        assert job.wait(60) == 143
        wait_until(lambda: not descendants(tmp_path))
    finally:
        job.kill()
        job.wait()
    for name, step in trained().items():
        assert latest_step(kept / name / "checkpoints") == step


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)

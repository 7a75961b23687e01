"""`m4 train` as several processes: the losses of one process, and how the others end."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from m4.storage.checkpoints import read_note
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from tests.command_line import m4
from tests.train.loop.job import COMMON, FOR_EVER, Job, started

# Exit statuses of a process that has lost another: m4's own, or JAX aborts it.
LOST = (1, -signal.SIGABRT)


def steps(folder: Path) -> int:
    """The last step of which there are metrics."""
    rows = read_metrics(folder)
    return rows[-1]["step"] if rows else 0


def losses(folder: Path) -> dict[int, dict[str, float]]:
    wanted = ("loss", "nll", "auxiliary_loss", "gradient_norm", "target_tokens", "nll/en-gl")
    rows = [row for row in read_metrics(folder) if "loss" in row]
    return {row["step"]: {name: row.get(name, 0.0) for name in wanted} for row in rows}


def assert_as_never_interrupted(
    folder: Path, last: int, alone: Path, *arguments: str, corpus: Path | None = None
) -> None:
    """The losses in `folder` up to step `last` are those of one process that trains in `alone`.

    corpus: a run that made the same corpus, which is then not rebuilt.
    """
    if corpus is not None:
        trained = ("checkpoints", "metrics.jsonl", "atlas.train.json")
        shutil.copytree(corpus, alone, ignore=shutil.ignore_patterns(*trained))
    end = f"--gin.TRAIN_STEPS={last}"
    said = m4("train", *COMMON, *arguments, f"--model_dir={alone}", end)
    assert said.status == 0, said.err
    found, expected = losses(folder), losses(alone)
    assert found.keys() == expected.keys() == set(range(1, last + 1))
    for step, row in found.items():
        assert row == pytest.approx(expected[step], rel=1e-5, abs=1e-5), step


class Killed(NamedTuple):
    """Two processes that have ended because one of them was killed in the middle of a checkpoint.

    seconds: until the other one had ended. said: by each.
    """

    folder: Path
    statuses: list[int]
    seconds: float
    said: list[str]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Two devices each, with different rows. Not to be changed by tests."""
    logs = tmp_path_factory.mktemp("killed")
    folder = logs / "model"
    checkpoints = folder / "checkpoints"
    job = Job(logs / "two", 2, 2, f"--model_dir={folder}", FOR_EVER)
    with started(job):
        # A checkpoint is there, and the next one has been begun. The first process gives it its
        # name when both have written their parts.
        job.wait_for(lambda: latest_step(checkpoints) is not None, 300)
        job.wait_for(lambda: bool(unfinished(checkpoints)), 60, every=0.002)
        job.processes[1].kill()
        at = time.monotonic()
        statuses = job.statuses(60)
        return Killed(folder, statuses, time.monotonic() - at, job.said())


def unfinished(checkpoints: Path) -> list[Path]:
    return list(checkpoints.glob("*.orbax-checkpoint-tmp*"))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_killed_at_a_checkpoint_ends_the_other_and_the_run_resumes(
    killed: Killed, tmp_path: Path
) -> None:
    assert killed.statuses[0] in LOST, killed.said
    assert killed.statuses[1] == -signal.SIGKILL
    assert killed.seconds < 60
    # Only the first one speaks.
    assert "corpus: 100/100 %" in killed.said[0]
    assert "corpus" not in killed.said[1]
    folder = shutil.copytree(killed.folder, tmp_path / "model")
    complete = latest_step(folder / "checkpoints")
    assert complete is not None
    # The one that was begun is none: two steps later, as COMMON has it.
    (begun,) = unfinished(folder / "checkpoints")
    assert begun.name.startswith(f"{complete + 2}.")
    assert steps(folder) >= complete + 1

    # One process with eight devices resumes from the complete one.
    end = f"--gin.TRAIN_STEPS={complete + 3}"
    said = m4("train", *COMMON, f"--model_dir={folder}", end)
    assert said.status == 0, said.err
    assert latest_step(folder / "checkpoints") == complete + 3
    assert not unfinished(folder / "checkpoints")
    assert_as_never_interrupted(folder, complete + 3, tmp_path / "alone", corpus=killed.folder)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_skip_the_same_steps(killed: Killed, tmp_path: Path) -> None:
    """Every value above the median is a spike: at least one step is skipped."""
    rules = [
        "--gin.experiment.Training.on_bad_step='skip'",
        "--gin.experiment.BadSteps.spike_threshold=1e-3",
        "--gin.experiment.BadSteps.window=4",
        "--gin.experiment.BadSteps.most_in_a_row=1000",
        "--gin.TRAIN_STEPS=12",
    ]
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        data = shutil.copytree(killed.folder / "data", tmp_path / f"data{count}")
        own = [f"--model_dir={folder}", f"--gin.experiment.Data.data_dir='{data}'"]
        job = Job(tmp_path / f"log{count}", count, 4 // count, *own, *rules)
        with started(job):
            assert job.statuses(300) == [0] * count, job.said()
        assert latest_step(folder / "checkpoints") == 12
        found[count] = read_note(folder, 12)["bad_steps"]
    steps_of = {count: [one["step"] for one in bad] for count, bad in found.items()}
    assert steps_of[1] == steps_of[2]
    assert steps_of[1]


@pytest.mark.slow
@pytest.mark.thorough
def test_another_number_of_processes_resumes_and_stops_together(
    killed: Killed, tmp_path: Path
) -> None:
    """Four, matrices sharded: 0 and 1 have the same rows, 2 and 3 too. One gets SIGTERM."""
    folder = shutil.copytree(killed.folder, tmp_path / "model")
    before = latest_step(folder / "checkpoints")
    assert before is not None
    later = folder / "checkpoints" / str(before + 1)  # damaged: all processes take the one before
    shutil.copytree(folder / "checkpoints" / str(before), later)
    (later / "params" / "manifest.ocdbt").write_bytes(b"")
    mesh = ["--gin.mesh.make_mesh.data=2", "--gin.mesh.make_mesh.model=4"]
    with started(Job(tmp_path / "four", 4, 2, f"--model_dir={folder}", FOR_EVER, *mesh)) as job:
        # Rows of lost work are there until the first new one is written.
        job.wait_for(lambda: (latest_step(folder / "checkpoints") or 0) > before + 1, 300)
        job.processes[3].send_signal(signal.SIGTERM)
        assert job.statuses(60) == [130] * 4, job.said()
    stopped = latest_step(folder / "checkpoints")
    assert stopped is not None
    assert stopped > before
    assert f"{before + 1}: damaged (params/manifest.ocdbt: 0 bytes" in job.said()[0]
    assert later.with_name(f"{later.name}.damaged").is_dir()
    for said in job.said():
        assert f"m4 train: interrupted at step {stopped} (saved)" in said, said
    assert steps(folder) == stopped
    assert_as_never_interrupted(folder, stopped, tmp_path / "alone", corpus=killed.folder)

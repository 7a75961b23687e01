"""`m4 train` as several processes: how they find each other, train as one does, and end."""

import random
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from m4.storage.checkpoints import read_note
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from tests.command_line import m4
from tests.train.loop.job import COMMON, FOR_EVER, Job, started


@pytest.mark.slow
@pytest.mark.thorough
def test_processes_that_do_not_find_each_other_report_it(tmp_path: Path) -> None:
    """No process answers; the port is another program's; and Ctrl-C while a process waits."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # What listens there is no job of m4's, so that the second process finds none either.
        address = f"--coordinator_address=127.0.0.1:{taken.getsockname()[1]}"
        model = f"--model_dir={tmp_path / 'model'}"
        with (
            started(Job(tmp_path / "soon", 2, 1, address, "--join_timeout_s=1", model)) as soon,
            started(Job(tmp_path / "late", 2, 1, address, "--join_timeout_s=500", model)) as late,
        ):
            first_status, second_status = soon.statuses(300)
            assert first_status == 1, soon.said()
            assert second_status in (1, -signal.SIGABRT), soon.said()
            first = soon.said()[0].splitlines()[-1]
            assert "m4 train: process 0 cannot listen at 127.0.0.1" in first
            assert "is the port taken? (coordinator_address; " in first
            until = time.monotonic() + 300
            while "process 1 waits for the others" not in late.said()[1]:
                assert time.monotonic() < until, late.said()
                time.sleep(0.1)
            late.processes[1].send_signal(signal.SIGINT)
            assert late.processes[1].wait(60) == 130
            assert (
                late.said()[1].splitlines()[-1] == "m4: interrupted; run the same command to resume"
            )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_signal_during_start_up_ends_all_processes(tmp_path: Path) -> None:
    """Before they join, while they join, build the corpus, compile: none trains on, or hangs."""
    rng = random.Random(0)
    folder = f"--model_dir={tmp_path / 'model'}"
    for index, number in enumerate([signal.SIGTERM, signal.SIGINT] * 2):
        join = "--join_timeout_s=30"
        with started(Job(tmp_path / f"job{index}", 2, 1, folder, join, FOR_EVER)) as job:
            seconds = rng.uniform(1.0, 3.0 + 4.0 * index)
            time.sleep(seconds)
            job.processes[index % 2].send_signal(number)
            statuses = job.statuses(120)
            print(round(seconds, 1), number, statuses)
            # 1: that process is lost, or no longer there to be joined.
            allowed = {1, -signal.SIGABRT, 130, 128 + number, -number}
            assert {*statuses} <= allowed, (seconds, job.said())
            assert statuses[index % 2] != 1, (seconds, job.said())


@pytest.mark.slow
def test_processes_that_disagree_do_not_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    each = ["--gin.experiment.Training.seed=0", "--gin.experiment.Training.seed=1"]
    with started(Job(tmp_path / "job", 2, 1, f"--model_dir={folder}", each=each)) as job:
        assert job.statuses(200) == [2, 2], job.said()
        for said in job.said():
            # JAX may print something about the other's end after it.
            (line,) = (line for line in said.splitlines() if line.startswith("m4 train: the"))
            assert "the 2 processes do not agree, so nothing is started" in line
            assert ": config " in line
    assert not folder.exists()


# Exit statuses of a process that has lost another: m4's own, or JAX aborts it.
LOST = (1, -signal.SIGABRT)


def steps(folder: Path) -> int:
    """Returns the last step with metrics."""
    rows = read_metrics(folder)
    return rows[-1]["step"] if rows else 0


def losses(folder: Path) -> dict[int, dict[str, float]]:
    wanted = ("loss", "nll", "auxiliary_loss", "gradient_norm", "target_tokens", "nll/en-gl")
    rows = [row for row in read_metrics(folder) if "loss" in row]
    return {row["step"]: {name: row.get(name, 0.0) for name in wanted} for row in rows}


def assert_as_never_interrupted(
    folder: Path, last: int, alone: Path, *arguments: str, corpus: Path | None = None
) -> None:
    """Asserts that losses in `folder` up to step `last` equal those of one process in `alone`.

    corpus: a run that made the same corpus, which is then not rebuilt.
    """
    if corpus is not None:
        trained = ("checkpoints", "metrics.jsonl", "atlas.train.json")
        shutil.copytree(corpus, alone, ignore=shutil.ignore_patterns(*trained))
    end = f"--gin.TRAIN_STEPS={last}"
    m4("train", *COMMON, *arguments, f"--model_dir={alone}", end).ok()
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
    """Returns killed processes of two devices each, with different rows; tests only read it."""
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
    m4("train", *COMMON, f"--model_dir={folder}", f"--gin.TRAIN_STEPS={complete + 3}").ok()
    assert latest_step(folder / "checkpoints") == complete + 3
    assert not unfinished(folder / "checkpoints")
    assert_as_never_interrupted(folder, complete + 3, tmp_path / "alone", corpus=killed.folder)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_skip_the_same_steps(killed: Killed, tmp_path: Path) -> None:
    """Every value above the median is a spike: at least one step is skipped."""
    rules = [
        "--gin.experiment.Training.on_bad_step='skip'",
        "--gin.experiment.BadSteps.spike_threshold=1e-3", "--gin.experiment.BadSteps.window=4",
        "--gin.experiment.BadSteps.most_in_a_row=1000", "--gin.TRAIN_STEPS=12",
    ]  # fmt: skip
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

"""`m4 train` as several processes: how they find each other, agree, and end before they train."""

from __future__ import annotations

import random
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.train.loop.job import FOR_EVER, Job, started


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
@pytest.mark.parametrize(
    ("each", "what"),
    [
        (["--gin.experiment.Training.seed=0", "--gin.experiment.Training.seed=1"], ": config "),
        pytest.param(
            ["--process_count=2", "--process_count=3"],
            "process_count 3, the other 1: 2",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_processes_that_disagree_do_not_start(tmp_path: Path, each: list[str], what: str) -> None:
    folder = tmp_path / "model"
    with started(Job(tmp_path / "job", 2, 1, f"--model_dir={folder}", each=each)) as job:
        assert job.statuses(200) == [2, 2], job.said()
        for said in job.said():
            # JAX may print something about the other's end after it.
            (line,) = (line for line in said.splitlines() if line.startswith("m4 train: the"))
            assert "the 2 processes do not agree, so nothing is started" in line
            assert what in line
    assert not folder.exists()

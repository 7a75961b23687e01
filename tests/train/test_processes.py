"""`m4 train` as several processes: the losses of one process, and what becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from m4.core import lease, remote
from m4.core.checkpoint import latest_step
from m4.core.report import read_metrics
from m4.core.supervise import LOST
from tests.command_line import TINY, m4

# Metrics at every step. Four heads go on four devices.
COMMON = [
    f"--gin_file={TINY}",
    "--gin.loop.train.log_period=1",
    "--gin.loop.train.checkpoint_period=2",
    "--gin.jobs.Setup.dev_period=1000",
    "--gin.transformer.Transformer.heads=4",
    "--gin.transformer.Transformer.head_width=4",
]
FOR_EVER = "--gin.TRAIN_STEPS=100000"
HEARTBEAT_SECONDS = 5


class Job:
    """`m4 train` in `count` processes of `devices` devices each."""

    def __init__(
        self,
        log: Path,
        count: int,
        devices: int,
        *arguments: str,
        each: Sequence[str] = (),
        homes: Sequence[Path] = (),
    ):
        """each: a further argument for each process; homes: where each keeps working copies."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": str(devices),
            # XLA's threads: with fewer than there are devices, collectives can wait for each other.
            "NPROC": "32",
        }
        self.logs = [log.with_name(f"{log.name}.{index}") for index in range(count)]
        self.processes = []
        for index, path in enumerate(self.logs):
            command = [
                *(
                    sys.executable,
                    "-m",
                    "m4",
                    "train",
                    *COMMON,
                ),
                f"--coordinator_address=127.0.0.1:{port}",
                f"--process_count={count}",
                f"--process_index={index}",
                f"--heartbeat_seconds={HEARTBEAT_SECONDS}",
                *arguments,
                *each[index : index + 1],
            ]
            if homes:
                environment["XDG_CACHE_HOME"] = str(homes[index])
            with path.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment
                    )
                )

    def statuses(self, seconds: float) -> list[int]:
        """Exit statuses, when all have ended."""
        until = time.monotonic() + seconds
        return [one.wait(max(until - time.monotonic(), 0.1)) for one in self.processes]

    def said(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self.logs]

    def wait_for(self, done: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not done():
            ended = [one.poll() for one in self.processes if one.poll() is not None]
            assert not ended, (ended, self.said())
            assert time.monotonic() < until, self.said()
            time.sleep(0.1)


@contextmanager
def started(job: Job) -> Iterator[Job]:
    """None of its processes is left behind; a waiting one takes the one at work with it."""
    try:
        yield job
    finally:
        for one in job.processes:
            one.kill()
            one.wait()


def steps(folder: Path) -> int:
    """The last step of which there are metrics."""
    rows = read_metrics(folder)
    return rows[-1]["step"] if rows else 0


def losses(folder: Path) -> dict[int, dict[str, float]]:
    wanted = ("loss", "nll", "auxiliary_loss", "gradient_norm", "target_tokens", "nll/en-gl")
    rows = [row for row in read_metrics(folder) if "loss" in row]
    return {row["step"]: {name: row.get(name, 0.0) for name in wanted} for row in rows}


def assert_as_never_interrupted(folder: Path, last: int, alone: Path, *arguments: str) -> None:
    """The losses in `folder` up to step `last` are those of one process that trains in `alone`."""
    end = f"--gin.TRAIN_STEPS={last}"
    said = m4("train", *COMMON, *arguments, f"--model_dir={alone}", end)
    assert said.status == 0, said.err
    found, expected = losses(folder), losses(alone)
    assert found.keys() == expected.keys() == set(range(1, last + 1))
    for step, row in found.items():
        assert row == pytest.approx(expected[step], rel=1e-5, abs=1e-5), step


@pytest.mark.slow
def test_processes_train_as_one_does_and_go_on_with_another_number(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    here = f"--model_dir={folder}"

    # Two processes of two devices, each with rows of its own; one of them is asked to stop.
    with started(Job(tmp_path / "two", 2, 2, here, FOR_EVER)) as job:
        job.wait_for(lambda: steps(folder) >= 3, 300)
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.statuses(60) == [130, 130], job.said()
        stopped = latest_step(folder / "checkpoints")
        assert stopped is not None
        assert stopped >= 3
        for said in job.said():
            line = f"m4 train: interrupted at step {stopped}, which is saved"
            assert line in said, said
        # Only the first one speaks.
        assert "corpus: 100/100 %" in job.said()[0]
        assert "corpus" not in job.said()[1]
    assert steps(folder) == stopped

    # Four go on from its checkpoint, with matrices in parts: processes 0 and 1 have the same rows,
    # 2 and 3 too. One is killed.
    mesh = ["--gin.mesh.make_mesh.data=2", "--gin.mesh.make_mesh.model=4"]
    with started(Job(tmp_path / "four", 4, 2, here, FOR_EVER, *mesh)) as job:
        job.wait_for(lambda: steps(folder) >= stopped + 3, 300)
        job.processes[3].kill()
        killed = time.monotonic()
        assert job.statuses(60) == [1, 1, 1, -signal.SIGKILL], job.said()
        assert time.monotonic() - killed < 60
        for said in job.said()[:3]:
            assert said.splitlines()[-1].startswith(f"m4 train: {LOST}"), said
    last = steps(folder)
    assert last >= stopped + 3

    assert_as_never_interrupted(folder, last, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.thorough
def test_stages_in_processes_of_their_own_and_a_folder_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline across two machines of four devices that share a store only; both end, and another
    one goes on without a pipeline."""
    store = tmp_path / "store" / "run"
    address = f"--model_dir=file://{store}"
    model = [
        "--gin.transformer.Transformer.num_experts=0",
        "--gin.transformer.Transformer.encoder_layers=2",
        "--gin.transformer.Transformer.decoder_layers=2",
        "--gin.transformer.Transformer.scan_layers=True",
        "--gin.transformer.Transformer.microbatches=2",
        # A pipeline draws other numbers.
        "--gin.transformer.Transformer.dropout_rate=0.0",
    ]
    mesh = ["--gin.mesh.make_mesh.stage=2", "--gin.mesh.make_mesh.data=4"]
    homes = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(homes[0]))
    here = remote.local(f"file://{store}")
    job = Job(tmp_path / "two", 2, 4, address, FOR_EVER, *model, *mesh, homes=homes)
    with started(job):
        job.wait_for(lambda: (latest_step(store / "checkpoints") or 0) >= 4, 300)
        job.processes[0].kill()
        assert job.statuses(60) == [-signal.SIGKILL, 1], job.said()
        assert job.said()[1].splitlines()[-1].startswith(f"m4 train: {LOST}"), job.said()
    assert steps(here) >= 4
    stopped = latest_step(store / "checkpoints")
    assert stopped is not None
    checkpoint = store / "checkpoints" / str(stopped)
    note = json.loads((checkpoint / "note" / "metadata").read_text(encoding="utf-8"))
    assert note["pipeline"]["stages"] == 2
    # Of a checkpoint each has written its parts, and the second one has read the corpus there.
    parts = {path.name for path in (checkpoint / "params").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= parts
    (copy,) = (homes[1] / "m4").iterdir()
    assert (copy / "data" / "manifest.json").is_file()
    assert not list(copy.glob("metrics.jsonl")), "only the first one writes"
    # The first one could not say that it has left.
    assert list((store / lease.RUNNING).glob("[!.]*.json"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 0.05)
    end = f"--gin.TRAIN_STEPS={stopped + 1}"
    said = m4("train", *COMMON, *model, address, end)
    assert said.status == 0, said.err
    assert "was at work there; waiting whether it still is" in said.err
    assert not list((store / lease.RUNNING).glob("[!.]*.json"))

    assert_as_never_interrupted(store, stopped + 1, tmp_path / "alone", *model)


@pytest.mark.slow
@pytest.mark.thorough
def test_processes_whose_folder_is_taken_over_end(tmp_path: Path) -> None:
    store = tmp_path / "store" / "run"
    homes = [tmp_path / "first", tmp_path / "second"]
    job = Job(tmp_path / "job", 2, 1, f"--model_dir=file://{store}", FOR_EVER, homes=homes)
    with started(job):
        job.wait_for(lambda: latest_step(store / "checkpoints") is not None, 300)
        (mine,) = (store / lease.RUNNING).glob("[!.]*.json")
        said = json.loads(mine.read_text(encoding="utf-8"))
        other = {**said, "host": "elsewhere", "number": said["number"] + 1}
        (mine.parent / "other.json").write_text(json.dumps(other), encoding="utf-8")
        # Long before it would renew: the next checkpoint is where it looks.
        assert job.statuses(60) == [3, 1], job.said()
        first, second = (said.splitlines()[-1] for said in job.said())
        assert first.startswith(f"m4 train: MODEL_DIR = {store}: another job has taken it over")
        assert second.startswith("m4 train: the first process failed: MODEL_DIR")
    assert [path.name for path in mine.parent.iterdir()] == ["other.json"]


@pytest.mark.slow
@pytest.mark.thorough
def test_processes_that_do_not_come_together_say_so(tmp_path: Path) -> None:
    """Nobody answers; the port is another's; and Ctrl-C while a process waits."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # What listens there is no job of m4's, so that the second process finds nobody either.
        address = f"--coordinator_address=127.0.0.1:{taken.getsockname()[1]}"
        model = f"--model_dir={tmp_path / 'model'}"
        with (
            started(Job(tmp_path / "soon", 2, 1, address, "--start_seconds=1", model)) as soon,
            started(Job(tmp_path / "late", 2, 1, address, "--start_seconds=500", model)) as late,
        ):
            assert soon.statuses(300) == [1, 1], soon.said()
            first, second = (said.splitlines()[-1] for said in soon.said())
            assert "m4 train: the first process cannot answer at 127.0.0.1" in first
            assert "is the port taken? (--coordinator_address; " in first
            assert "m4 train: the processes did not find each other at 127.0.0.1" in second
            assert "within 1 s (--start_seconds)" in second
            until = time.monotonic() + 300
            while "process 1 waits for the others" not in late.said()[1]:
                assert time.monotonic() < until, late.said()
                time.sleep(0.1)
            late.processes[1].send_signal(signal.SIGINT)
            assert late.processes[1].wait(60) == 130
            assert late.said()[1].splitlines()[-1] == "m4 train: ended by SIGINT"


@pytest.mark.slow
def test_processes_that_were_told_other_things_do_not_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    here = f"--model_dir={folder}"
    seeds = ["--gin.jobs.Setup.seed=0", "--gin.jobs.Setup.seed=1"]
    counts = ["--process_count=2", "--process_count=3"]
    with (
        started(Job(tmp_path / "config", 2, 1, here, each=seeds)) as config,
        started(Job(tmp_path / "count", 2, 1, here, each=counts)) as count,
    ):
        for job, what in ((config, ": config "), (count, "--process_count 3, the other 1: 2")):
            assert job.statuses(200) == [2, 2], job.said()
            for said in job.said():
                *_, line = said.splitlines()
                assert "m4 train: the 2 processes do not agree, so nothing is started" in line
                assert what in line
    assert not folder.exists()

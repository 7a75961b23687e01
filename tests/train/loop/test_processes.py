"""`m4 train` as several processes: the losses of one process, and how the others end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from m4.parallel.supervise import PEER_LOST
from m4.storage import lease, remote
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from m4.train.loop.guard import read_bad_steps
from tests.command_line import TINY, m4

# Metrics at every step. Four heads for four devices.
COMMON = [
    f"--gin_file={TINY}",
    "--gin.experiment.Training.log_period=1",
    "--gin.experiment.Training.checkpoint_period=2",
    "--gin.experiment.Training.dev_period=1000",
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

    def wait_for(self, done: Callable[[], bool], seconds: float, every: float = 0.1) -> None:
        until = time.monotonic() + seconds
        while not done():
            ended = [one.poll() for one in self.processes if one.poll() is not None]
            assert not ended, (ended, self.said())
            assert time.monotonic() < until, self.said()
            time.sleep(every)


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
    assert killed.statuses == [1, -signal.SIGKILL], killed.said
    assert killed.seconds < 60
    assert killed.said[0].splitlines()[-1].startswith(f"m4 train: {PEER_LOST}"), killed.said
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
def test_two_processes_go_back_together(killed: Killed, tmp_path: Path) -> None:
    """Every value above the median is a spike: training goes back at least once."""
    rules = [
        "--gin.experiment.Training.on_bad_step='rewind'",
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
        found[count] = [one["left_out"] for one in read_bad_steps(folder)]
    assert found[1] == found[2]
    assert found[1]


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


@pytest.mark.slow
@pytest.mark.thorough
def test_a_pipeline_over_processes_with_a_folder_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline across two machines of four devices that share a store only; both end, and another
    one resumes without a pipeline."""
    store = tmp_path / "store" / "run"
    address = f"--model_dir=file://{store}"
    model = [
        "--gin.transformer.Transformer.moe=None",
        "--gin.transformer.Transformer.encoder_layers=2",
        "--gin.transformer.Transformer.decoder_layers=2",
        "--gin.transformer.Transformer.scan_layers=True",
        "--gin.transformer.Transformer.pipeline_microbatches=2",
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
        assert job.said()[1].splitlines()[-1].startswith(f"m4 train: {PEER_LOST}"), job.said()
    assert steps(here) >= 4
    stopped = latest_step(store / "checkpoints")
    assert stopped is not None
    checkpoint = store / "checkpoints" / str(stopped)
    note = json.loads((checkpoint / "note" / "metadata").read_text(encoding="utf-8"))
    assert note["pipeline"]["stages"] == 2
    # Of a checkpoint each has written its parts, and the second one has read the corpus there.
    parts = {path.name for path in (checkpoint / "params").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= parts
    (corpus,) = (homes[1] / "m4").glob("data.*")
    assert (corpus / "train.english.tokens.npy").is_file()
    assert not (corpus / "text").exists(), "training reads no text"
    (copy,) = (homes[1] / "m4").glob("run.*")
    assert not list(copy.glob("metrics.jsonl")), "only the first one writes"
    # The first one could not release its lease.
    assert list((store / lease.RUNNING).glob("[!.]*.json"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 0.05)
    end = f"--gin.TRAIN_STEPS={stopped + 1}"
    said = m4("train", *COMMON, *model, address, end)
    assert said.status == 0, said.err
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
        other = {**said, "host": "elsewhere", "job": "another"}
        mine.write_text(json.dumps(other), encoding="utf-8")
        # Long before it would renew: the next checkpoint is where it looks.
        assert job.statuses(60) == [3, 1], job.said()
        first, second = (said.splitlines()[-1] for said in job.said())
        assert first.startswith(f"m4 train: MODEL_DIR = file://{store}: another job has")
        assert second.startswith("m4 train: process 0 failed: MODEL_DIR")
    assert json.loads(mine.read_text(encoding="utf-8")) == other


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
            assert soon.statuses(300) == [1, 1], soon.said()
            first, second = (said.splitlines()[-1] for said in soon.said())
            assert "m4 train: process 0 cannot listen at 127.0.0.1" in first
            assert "is the port taken? (coordinator_address; " in first
            assert "m4 train: the processes did not find each other at 127.0.0.1" in second
            assert "within 1 s (join_timeout_s)" in second
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
            allowed = {1, 130, 128 + number, -number}
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

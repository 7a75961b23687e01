"""A signal at any moment of a job ends it within seconds, and nothing is lost.

The same command then makes what an undisturbed one makes.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m4.storage.files import read_jsonl
from tests.command_line import ALONE, TINY, contents, descendants
from tests.train.trainers import timeless_rows

RESUME = "interrupted; run the same command to resume"
# What shells make of a process that a signal has ended.
STATUSES = {number: (128 + number, -number) for number in (signal.SIGINT, signal.SIGTERM)}
SECONDS = 30.0
SIGNALS, INTERRUPTED = 16, 10


def command(job: str, folder: Path, *more: str) -> list[str]:
    return ["-m", "m4", job, f"--gin_file={TINY}", f"--model_dir={folder}", *more]


@pytest.mark.parametrize(
    ("moment", "number"),
    [("numpy", signal.SIGTERM), ("jax", signal.SIGINT), ("orbax.checkpoint", signal.SIGINT)],
)
def test_a_signal_during_start_up_ends_the_job(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    """Sent when an import has just ended: Python lists each, on stderr."""
    words = [sys.executable, "-X", "importtime", *command("train", tmp_path / "model")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ALONE) as job:
        assert job.stderr is not None
        for line in job.stderr:
            if line.rpartition("|")[2].strip() == moment:
                break
        job.send_signal(number)
        rest = [line for line in job.stderr if not line.startswith("import time:")]
        assert job.wait(SECONDS) == 128 + number
    assert rest[-1].endswith(f"{RESUME}\n")
    assert "Traceback" not in "".join(rest)


# A step that still runs uses what the interpreter's end destroys; here that is status 99.
ENDS = """
import atexit, os, signal, sys
from m4.jobs import train
from m4.cli.main import main

class UsedByAStep:
    def __del__(self):
        os._exit(99)

step = UsedByAStep()
atexit.register(print, "exit handlers ran")
train.run = lambda *_: signal.raise_signal(signal.SIGTERM)
from m4.parallel.platform import signals
signals.install()
sys.argv = ["m4", "train"]
sys.exit(main())
"""


def test_a_job_ended_by_a_signal_leaves_a_running_step_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, env=ALONE)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.endswith(f"{RESUME}\n")
    assert done.stdout == "exit handlers ran\n"


@pytest.mark.slow
@pytest.mark.thorough
def test_signals_over_a_whole_demo_lose_nothing(tmp_path: Path) -> None:
    """Start-up, corpus, vocabulary, compiling, steps, saving, baselines, decoding, report."""
    whole = tmp_path / "whole"
    began = time.monotonic()
    subprocess.run([sys.executable, *command("demo", whole)], env=ALONE, check=True)
    longest = time.monotonic() - began
    rng = random.Random(0)
    moments = [(i + rng.random()) / SIGNALS * longest for i in range(SIGNALS)]
    rng.shuffle(moments)
    folder = tmp_path / "parts"
    ends: list[tuple[float, int, float]] = []  # seconds to the signal, status, seconds to the end
    # A second round until enough were interrupted: how many jobs end before their signal depends
    # on the machine.
    for i, (seconds, number) in enumerate(zip(moments * 2, [*STATUSES] * SIGNALS, strict=True)):
        if i >= SIGNALS and interrupted(ends) >= INTERRUPTED:
            break
        job = subprocess.Popen(
            [sys.executable, *command("demo", folder)], env={**ALONE, "M4_TEST": str(tmp_path)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            said = job.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            job.send_signal(number)
            began = time.monotonic()
            said = job.communicate(timeout=60)[0]
            ends.append((round(seconds, 2), job.returncode, round(time.monotonic() - began, 2)))
            print(ends[-1], flush=True)
            # Python's own start, before m4's first line, has another status.
            expected = (0, 130, *STATUSES[number], *([1] if seconds < 0.5 else []))
            assert job.returncode in expected, (ends, said)
        if job.returncode == 0:
            assert_same(folder, whole)
            shutil.rmtree(folder)
        until = time.monotonic() + 30
        while left := descendants(tmp_path):
            assert time.monotonic() < until, (left, said)
            time.sleep(0.1)
    subprocess.run([sys.executable, *command("demo", folder)], env=ALONE, check=True)
    assert_same(folder, whole)
    assert interrupted(ends) >= INTERRUPTED, ends


def interrupted(ends: list[tuple[float, int, float]]) -> int:
    return sum(status != 0 for _, status, _ in ends)


def assert_same(folder: Path, whole: Path) -> None:
    """Asserts equal corpora, losses, translations and scores."""
    for run in (Path(), *(path.relative_to(whole) for path in whole.glob("baselines/*.*"))):
        if (whole / run / "metrics.jsonl").exists():
            assert timeless_rows(folder / run) == timeless_rows(whole / run), run
    kept = ("data/", "decodes/", "baselines/")
    ours, theirs = (
        {k: v for k, v in contents(one).items() if k.startswith(kept) and k.endswith((".npy", "l"))}
        for one in (folder, whole)
    )
    theirs = {k: v for k, v in theirs.items() if not k.endswith("metrics.jsonl")}
    assert {k: ours.get(k) for k in theirs} == theirs
    scores = [
        [{**row, "config": ""} for row in read_jsonl(one / "scores.jsonl")]
        for one in (folder, whole)
    ]
    assert scores[0] == scores[1]

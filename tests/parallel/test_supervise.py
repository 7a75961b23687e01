"""What the waiting process makes of the end of the one at work."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m4.parallel.supervise import PEER_LOST

START = """
import os, signal, sys, time
from m4.parallel.supervise import supervise
status = supervise("m4 train")
if status is not None:
    sys.exit(status)
"""
# What it prints is there when its handler is.
WORK = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def run(work: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + work], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("status", [0, 2, 130])
def test_the_status_is_that_of_the_work(status: int) -> None:
    said = run(f"sys.exit({status})")
    assert (said.returncode, said.stdout, said.stderr) == (status, "", "")


def test_an_abort_is_told_as_the_loss_of_another_process() -> None:
    said = run("os.abort()")
    assert (said.returncode, said.stderr) == (1, f"m4 train: {PEER_LOST}\n")


def test_an_abort_is_told_as_what_it_means_at_that_moment() -> None:
    within = (
        "from m4.parallel.supervise import abort_message\nwith abort_message('ü' * 9000):\n    "
    )
    said = run(f"{within}os.abort()")
    assert said.returncode == 1
    assert said.stderr.startswith("m4 train: üü")
    said = run(f"{within}pass\nos.abort()")
    assert said.stderr == f"m4 train: {PEER_LOST}\n"


def test_a_kill_is_told() -> None:
    said = run("os.kill(os.getpid(), signal.SIGKILL)")
    # 128 + 9, as shells have it.
    assert said.returncode == 137
    assert said.stderr == "m4 train: ended by SIGKILL (out of memory?)\n"


def test_signals_reach_the_work() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START + WORK], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) != process.pid
        process.terminate()
        assert process.wait(timeout=30) == 130


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_the_work_does_not_outlive_who_waits() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START + WORK], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    until = time.monotonic() + 30
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Whether it is at work: one that has ended may stay in the table until somebody asks."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

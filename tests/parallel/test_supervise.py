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
def test_exit_status_is_that_of_the_work(status: int) -> None:
    message = run(f"sys.exit({status})")
    assert (message.returncode, message.stdout, message.stderr) == (status, "", "")


def test_abort_is_reported_as_a_lost_peer() -> None:
    message = run("os.abort()")
    assert (message.returncode, message.stderr) == (1, f"m4 train: {PEER_LOST}\n")


def test_abort_is_reported_with_the_current_message() -> None:
    within = (
        "from m4.parallel.supervise import abort_message\nwith abort_message('ü' * 9000):\n    "
    )
    message = run(f"{within}os.abort()")
    assert message.returncode == 1
    assert message.stderr.startswith("m4 train: üü")
    message = run(f"{within}pass\nos.abort()")
    assert message.stderr == f"m4 train: {PEER_LOST}\n"


def test_kill_is_reported() -> None:
    message = run("os.kill(os.getpid(), signal.SIGKILL)")
    # 128 + 9, as shells have it.
    assert message.returncode == 137
    assert message.stderr == "m4 train: ended by SIGKILL (out of memory?)\n"


def test_signals_reach_the_work() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START + WORK], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) != process.pid
        process.terminate()
        assert process.wait(timeout=30) == 130


def test_a_signal_between_fork_and_handlers_reaches_the_work() -> None:
    fork = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "fork = os.fork\n"
        "def slow():\n"
        "    child = fork()\n"
        "    if child: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return child\n"
        "os.fork = slow\n"
    )
    # Short sleeps: a signal just before one, not yet seen by Python, does not cut it short.
    work = "for _ in range(600): time.sleep(0.05)"
    done = subprocess.run(
        [sys.executable, "-c", fork + START + work],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (143, "")


def test_work_does_not_outlive_its_parent() -> None:
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
    """Whether it runs: one that has ended may stay in the process table for a while."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

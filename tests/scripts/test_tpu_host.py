"""tpu_host.sh: jobs on one host and its environment."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bucket import BUCKET, emulated
from tests.documents.commands import write_program
from tests.scripts.cloud import SCRIPTS, call


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a home with an environment, whose m4 does what its first argument says."""
    monkeypatch.delenv("JAX_PLATFORMS")  # the tests' own
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    write_program(
        tmp_path / "m4-env" / "bin" / "m4",
        'printf "%s|" "$JAX_PLATFORMS" "$@"; echo\n'
        'trap "exit 130" TERM\n'
        'case "$1" in wait) while true; do sleep 0.05; done ;; *) exit "$1" ;; esac',
    )
    return tmp_path


def host_status(job: str = "train") -> str:
    said = call("tpu_host.sh", "status", job)
    assert said.returncode == 0, said.stderr
    found = re.fullmatch(r"m4-job \S+ (.+)\n", said.stdout)
    assert found, said.stdout
    return found[1]


def host_state(job: str = "train") -> str:
    """Returns `host_status` without the seconds for which the job has written nothing."""
    return re.sub(r"^running \d+$", "running", host_status(job))


def settled(state: str) -> bool:
    """Waits for the job to come to a state, for 20 seconds; tells if it did."""
    end = time.monotonic() + 20
    while host_state() != state and time.monotonic() < end:
        time.sleep(0.05)
    return host_state() == state


def test_job_on_a_host_is_started_watched_and_stopped(host: Path) -> None:
    assert host_state() == "none"
    assert call("tpu_host.sh", "start", "train", "wait", "a b", "it's").returncode == 0
    assert host_state() == "running"
    assert host_state("eval") == "none"
    again = call("tpu_host.sh", "start", "train", "wait")
    assert again.returncode == 2
    assert "running already" in again.stderr
    assert call("tpu_host.sh", "stop", "train").returncode == 0
    assert settled("failed 130")
    assert (host / "m4-jobs" / "train" / "log").read_text() == "tpu,cpu|wait|a b|it's|\n"
    assert call("tpu_host.sh", "stop", "train").returncode == 0  # nothing to stop
    assert host_state() == "failed 130"


def test_job_that_does_not_stop_is_killed_and_one_without_status_is_lost(host: Path) -> None:
    write_program(
        host / "m4-env" / "bin" / "m4",
        '[[ $PYTHONFAULTHANDLER == 1 ]] || exit 1\ntrap "" TERM\nwhile true; do sleep 0.05; done',
    )
    assert call("tpu_host.sh", "start", "train").returncode == 0
    assert call("tpu_host.sh", "stop", "train", "1").returncode == 0
    # 128 + SIGABRT, at which Python writes the stacks of all threads (PYTHONFAULTHANDLER).
    assert settled("failed 134")
    folder = host / "m4-jobs" / "train"
    (folder / "status").unlink()
    assert host_state() == "lost"  # its process is gone, without an exit status


def test_environment_of_a_job_is_its_own(host: Path) -> None:
    pair = "JAX_PLATFORMS=cpu"
    assert call("tpu_host.sh", "start", "train", pair, "A=1", "0").returncode == 0
    assert settled("finished")
    assert (host / "m4-jobs" / "train" / "log").read_text() == "cpu|0|\n"
    # Another start: the log of the first one stays.
    assert call("tpu_host.sh", "start", "train", "1").returncode == 0
    assert settled("failed 1")
    assert (host / "m4-jobs" / "train" / "log").read_text() == "tpu,cpu|1|\n"
    (kept,) = (host / "m4-jobs" / "train").glob("log.*")
    assert kept.read_text() == "cpu|0|\n"


def test_progress_is_what_a_job_writes(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run folder and working copy; two hours ago everything was written for the last time."""
    old = time.time() - 7200
    folder, copy = host / "run", host / "disk" / "m4" / "run.0123"
    for path in (folder / "metrics.jsonl", copy / "metrics.jsonl"):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (old, old))
    words = (f"XDG_CACHE_HOME={host}/disk", "wait", f"--model_dir={folder}")
    assert call("tpu_host.sh", "run", "3").returncode == 3  # no job: nothing to end
    assert call("tpu_host.sh", "alive", "60").returncode == 0
    process = subprocess.Popen(["bash", str(SCRIPTS / "tpu_host.sh"), "run", *words])
    try:
        pid = host / "m4-jobs" / "pod" / "pid"
        while not pid.exists() or host_state("pod") != "running":
            time.sleep(0.05)
        assert int(host_status("pod").split()[1]) < 60  # it has only just started
        os.utime(pid, (old, old))
        assert int(host_status("pod").split()[1]) >= 7200
        said = call("tpu_host.sh", "alive", "60")
        assert (said.returncode, said.stderr) == (2, "tpu_host.sh: no progress for 60 minutes\n")
        assert call("tpu_host.sh", "alive", "180").returncode == 0
        monkeypatch.setenv("TPU_WORKER_ID", "1")  # process 0 writes
        assert call("tpu_host.sh", "alive", "60").returncode == 0
        monkeypatch.delenv("TPU_WORKER_ID")
        for path in (folder / "metrics.jsonl", copy / "metrics.jsonl"):
            path.touch()
            assert call("tpu_host.sh", "alive", "60").returncode == 0
            os.utime(path, (old, old))
    finally:
        process.send_signal(signal.SIGTERM)  # as Kubernetes ends a pod
    assert process.wait(20) == 130  # m4's own


def test_log_is_copied_to_the_run_folder_with_a_traceback(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up m4 crashes as Python does."""
    write_program(host / "m4-env" / "bin" / "python", f'exec {sys.executable} "$@"')
    write_program(host / "m4-env" / "bin" / "m4", f'{sys.executable} -c "1/0"; exit 1')
    words = ("train", "--model_dir", f"gs://{BUCKET}/run/")
    with emulated() as (emulator, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        said = call("tpu_host.sh", "run", *words)
        assert said.returncode == 1
        assert "ZeroDivisionError" in said.stdout  # for `kubectl logs`
        (copied,) = emulator.names(f"run/logs/{socket.gethostname()}")
        assert re.fullmatch(r"pod\..*Z\.log", copied)
        place = f"run/logs/{socket.gethostname()}"
        assert emulator.read(f"{place}/{copied}").decode() == said.stdout
        assert call("tpu_host.sh", "start", "train", *words).returncode == 0
        assert settled("failed 1")
        end = time.monotonic() + 20
        while len(names := emulator.names(place) - {copied}) < 1 and time.monotonic() < end:
            time.sleep(0.05)
        (name,) = names
        assert name.startswith("train.")
        assert b"ZeroDivisionError" in emulator.read(f"{place}/{name}")

"""tpu_host.sh: jobs on one host and its environment."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.scripts.cloud import ROOT, call, make_program


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an environment, whose m4 does what its first argument says."""
    monkeypatch.delenv("JAX_PLATFORMS")  # the tests' own
    make_program(
        tmp_path / "m4-env" / "bin" / "m4",
        'printf "%s|" "$JAX_PLATFORMS" "$@"; echo\n'
        'trap "exit 130" TERM\n'
        'case "$1" in wait) while true; do sleep 0.05; done ;; *) exit "$1" ;; esac',
    )
    return tmp_path


def host_state(job: str = "train", *arguments: str) -> str:
    said = call("tpu_host.sh", "status", job, *arguments)
    assert said.returncode == 0, said.stderr
    found = re.fullmatch(r"m4-job \S+ (.+)\n", said.stdout)
    assert found, said.stdout
    return found[1]


def settled(state: str) -> bool:
    """Whether the job comes to a state, within 20 seconds."""
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


def test_status_reports_the_end_of_a_job(host: Path) -> None:
    for status, state in (("0", "finished"), ("2", "failed 2"), ("1", "failed 1")):
        assert call("tpu_host.sh", "start", "train", status).returncode == 0
        assert settled(state)


def test_job_is_identified_by_its_arguments(host: Path) -> None:
    mine, other = ("wait", "a b", "it's"), ("wait", "a", "b", "it's")
    assert host_state("train", *mine) == "none"
    assert call("tpu_host.sh", "start", "train", *mine).returncode == 0
    assert (host_state("train", *mine), host_state("train", *other)) == ("running", "other")
    assert call("tpu_host.sh", "stop", "train").returncode == 0
    assert settled("failed 130")
    assert (host_state("train", *mine), host_state("train", *other)) == ("failed 130", "other")
    assert call("tpu_host.sh", "start", "train", "0").returncode == 0
    assert settled("finished")
    assert (host_state("train", "0"), host_state("train", "1")) == ("finished", "other")
    # After a refusal by m4 a job with the corrected mistake starts.
    assert call("tpu_host.sh", "start", "train", "2").returncode == 0
    assert settled("failed 2")
    assert (host_state("train", "2"), host_state("train", "0")) == ("failed 2", "refused")
    # Started by another version of the script, which kept no arguments.
    assert call("tpu_host.sh", "start", "train", "0").returncode == 0
    assert settled("finished")
    (host / "m4-jobs" / "train" / "arguments").unlink()
    assert host_state("train", "0") == "other"


def test_job_that_does_not_stop_is_killed_and_one_without_status_is_lost(host: Path) -> None:
    make_program(host / "m4-env" / "bin" / "m4", 'trap "" TERM\nwhile true; do sleep 0.05; done')
    assert call("tpu_host.sh", "start", "train").returncode == 0
    assert call("tpu_host.sh", "stop", "train", "1").returncode == 0
    assert settled("failed 137")  # 128 + SIGKILL
    folder = host / "m4-jobs" / "train"
    (folder / "status").unlink()
    assert host_state() == "lost"  # its process is gone, without an exit status


def test_the_environment_of_a_host_is_locked(tmp_path: Path, fakes: Path) -> None:
    calls = tmp_path / "calls"
    make_program(fakes / "python3", f'echo python3 "$@" >>"{calls}"')
    make_program(tmp_path / ".local" / "bin" / "uv", f'echo uv "$@" >>"{calls}"')
    make_program(tmp_path / "m4-env" / "bin" / "m4", "true")
    assert call("tpu_host.sh", "setup").returncode == 0
    assert (tmp_path / "m4-env" / ".ready").exists()
    assert f"--require-hashes {ROOT}/requirements-tpu.lock" in calls.read_text()
    # Half an environment is none: the next look sets it up again.
    make_program(tmp_path / ".local" / "bin" / "uv", "false")
    assert call("tpu_host.sh", "setup").returncode != 0
    assert not (tmp_path / "m4-env" / ".ready").exists()

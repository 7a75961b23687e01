"""cloud_tpu.sh supervise, with a made-up cloud: what it does as the slice and its job change."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.scripts.cloud import (
    CLOUD_OF_FILES,
    SCRIPTS,
    TRAIN,
    call,
    dry,
    make_program,
    remote,
    slice_options,
)


class Supervised:
    """`supervise` in a copy of the scripts, over states of the slice and of its hosts' job."""

    def __init__(self, folder: Path, fakes: Path, rounds: list[str], *options: str):
        """rounds: "STATE" or "ACTIVE: what each of two hosts says"; the next look each."""
        shutil.copytree(SCRIPTS, folder / "repository" / "scripts")
        states = [text.split(":")[0] for text in rounds]
        jobs = [text.split(":")[1].strip() for text in rounds if ":" in text]
        # A host adds for how long its job has written nothing.
        jobs = [re.sub(r"\brunning\b(?!_)", "running_5", said) for said in jobs]
        (fakes / "states").write_text("".join(f"{state}\n" for state in states))
        (fakes / "jobs").write_text("".join(f"{said}\n" for said in jobs))
        make_program(fakes / "gcloud", f'fake="{fakes}"\n{CLOUD_OF_FILES}')
        make_program(fakes / "git", "true")
        self.said = call(
            folder / "repository" / "scripts" / "cloud_tpu.sh",
            "supervise",
            *slice_options("v4-16"),
            "--poll_seconds=0",
            *options,
            *TRAIN,
        )
        assert (fakes / "states").read_text() == "", "it ended early"
        self.did = done(fakes)


def done(fakes: Path) -> list[str]:
    """The steps that changed something."""
    steps = {
        "queued-resources create": "create",
        "queued-resources delete": "delete",
        "queued-resources scp": "copy",
        "tpu_host.sh setup": "setup",
        "tpu_host.sh start train train": "start",
        "tpu_host.sh stop train": "stop",
    }
    calls = (fakes / "calls").read_text().splitlines()
    return [name for line in calls for text, name in steps.items() if text in line]


SET_UP = ["copy", "setup", "start"]


def test_supervise_finishes_after_a_preemption(tmp_path: Path, fakes: Path) -> None:
    run = Supervised(
        tmp_path,
        fakes,
        [
            "NOT_FOUND",
            "WAITING_FOR_RESOURCES",
            "PROVISIONING",
            "ACTIVE: bare bare",
            "ACTIVE: running running",
            "ACTIVE: unreachable",
            "SUSPENDING",
            "SUSPENDED",
            "down",  # gcloud itself: another look
            "ACTIVE: bare bare",
            "ACTIVE: running running",
            "ACTIVE: running finished",
            "ACTIVE: finished finished",
        ],
        "--max_restarts=0",  # a preemption is no failure
    )
    assert run.said.returncode == 0, run.said.stderr
    assert run.did == ["create", *SET_UP, "delete", "create", *SET_UP]


def test_supervise_restarts_a_crashed_job_on_all_hosts(tmp_path: Path, fakes: Path) -> None:
    run = Supervised(
        tmp_path,
        fakes,
        [
            "ACTIVE: failed_1 running",  # the other waits for it
            "ACTIVE: running running",
            "ACTIVE: running lost",  # a machine that rebooted
            "ACTIVE: none running",
            "ACTIVE: failed_130 running",  # SIGTERM, and the slice is still there
            "ACTIVE: none none",
            "ACTIVE: finished finished",
        ],
        "--max_restarts=3",
    )
    assert run.said.returncode == 0, run.said.stderr
    assert run.did == ["stop", "start"] * 5


def test_supervise_gives_up_after_so_many_crashes(tmp_path: Path, fakes: Path) -> None:
    # The second one stopped at SIGTERM only because the first had crashed.
    rounds = ["ACTIVE: failed_1 failed_130", "FAILED", "ACTIVE: failed_255 running"]
    run = Supervised(tmp_path, fakes, rounds, "--max_restarts=2")
    assert run.said.returncode == 1
    assert "failure 3 (--max_restarts=2)" in run.said.stderr
    assert run.did == ["stop", "start", "delete", "create"]


def test_unreachable_host_is_reported_and_its_slice_asked_for_again(
    tmp_path: Path, fakes: Path
) -> None:
    rounds = ["ACTIVE: running running", "ACTIVE: unreachable", "ACTIVE: running"]
    end = "ACTIVE: finished finished"
    # Within the limit it waits; the last one is a host that says nothing.
    run = Supervised(tmp_path / "short", fakes, [*rounds, end], "--max_restarts=0")
    assert run.said.returncode == 0, run.said.stderr
    assert run.said.stderr.count("a host has not answered for 0 of at most 15 minutes") == 2
    assert "fewer answers than the 2 hosts" in run.said.stderr
    assert run.did == []
    (fakes / "calls").unlink()
    limit = "--unreachable_minutes=0"
    run = Supervised(tmp_path / "long", fakes, [*rounds, "ACTIVE: bare bare", end], limit)
    assert run.said.returncode == 0, run.said.stderr
    assert "a host does not answer: failure 2 of at most 20" in run.said.stderr
    assert run.did == ["delete", "create"] * 2 + SET_UP
    (fakes / "calls").unlink()
    run = Supervised(tmp_path / "never", fakes, rounds, limit, "--max_restarts=1")
    assert run.said.returncode == 1
    assert "failure 2 (--max_restarts=1)" in run.said.stderr


def test_job_that_writes_nothing_is_started_again(tmp_path: Path, fakes: Path) -> None:
    # Process 0 writes for all: the other host's silence means nothing.
    rounds = ["ACTIVE: running_59 running_7200", "ACTIVE: running_3600 running_7200"]
    end = "ACTIVE: finished finished"
    run = Supervised(tmp_path / "default", fakes, [*rounds, end])
    assert run.said.returncode == 0, run.said.stderr
    assert "written nothing for 60 minutes: failure 1" in run.said.stderr
    assert run.did == ["stop", "start"]
    (fakes / "calls").unlink()
    run = Supervised(tmp_path / "never", fakes, [*rounds, end], "--stall_minutes=0")
    assert run.did == []


def test_flags_and_environment_survive_a_preemption(tmp_path: Path, fakes: Path) -> None:
    options = ["--slices=1", "--spot", "--gcloud=--reserved", "--env=XLA_FLAGS=--a=1 --b=2"]
    options += ["--gcloud=--service-account=a@b", "--env=LIBTPU_INIT_ARGS=--c"]
    rounds = ["NOT_FOUND", "SUSPENDED", "ACTIVE: bare bare", "ACTIVE: finished finished"]
    run = Supervised(tmp_path, fakes, rounds, *options)
    assert run.said.returncode == 0, run.said.stderr
    calls = (fakes / "calls").read_text().splitlines()
    created = [line for line in calls if "queued-resources create" in line]
    assert len(created) == 2
    assert created[0] == created[1]
    assert "--spot " in created[0]
    assert created[0].endswith(" --reserved --service-account=a@b")
    # The job is known by its environment too.
    words = shlex.join(["train", "XLA_FLAGS=--a=1 --b=2", "LIBTPU_INIT_ARGS=--c", *TRAIN[1:]])
    assert sum(f"tpu_host.sh start {words}" in line for line in calls) == 1
    assert sum(f"tpu_host.sh status {words};" in line for line in calls) == 2


def test_supervise_retries_what_gcloud_refuses(tmp_path: Path, fakes: Path) -> None:
    (fakes / "refuse").touch()  # to copy the code
    rounds = ["ACTIVE: bare bare", "ACTIVE: bare bare", "ACTIVE: bare bare"]
    run = Supervised(tmp_path, fakes, rounds, "--max_restarts=2")
    assert run.said.returncode == 1
    assert "could not be set up: failure 3" in run.said.stderr
    assert run.did == ["copy"] * 3  # neither set up nor started without the code


def test_supervise_does_not_repeat_a_mistake(tmp_path: Path, fakes: Path) -> None:
    run = Supervised(tmp_path, fakes, ["ACTIVE: running running", "ACTIVE: running failed_2"])
    assert run.said.returncode == 2
    assert "m4 refused to start" in run.said.stderr
    assert run.did == ["stop"]
    # Nor where the job cannot be stopped on all hosts.
    (fakes / "silent").touch()
    run = Supervised(
        tmp_path / "silent", fakes, ["ACTIVE: running running", "ACTIVE: failed_2 running"]
    )
    assert run.said.returncode == 2
    assert "m4 refused to start" in run.said.stderr


def test_supervise_started_again_after_a_mistake_tries_once(tmp_path: Path, fakes: Path) -> None:
    # Put right in a file of the repository, which the hosts need to fetch again.
    rounds = ["ACTIVE: unreachable", "ACTIVE: running failed_2", "ACTIVE: running running"]
    run = Supervised(tmp_path / "right", fakes, [*rounds, "ACTIVE: finished finished"])
    assert run.said.returncode == 0, run.said.stderr
    assert run.did == ["stop", *SET_UP]
    (fakes / "calls").unlink()
    run = Supervised(tmp_path / "wrong", fakes, ["ACTIVE: none failed_2", "ACTIVE: failed_2 none"])
    assert run.said.returncode == 2
    assert run.did == ["stop", *SET_UP, "stop"]


def test_supervise_sets_up_the_hosts_of_a_refused_job_with_other_arguments(
    tmp_path: Path, fakes: Path
) -> None:
    # The commit may be another one, too: without it the hosts would start the refused one's code.
    rounds = ["ACTIVE: refused refused", "ACTIVE: running running", "ACTIVE: finished finished"]
    run = Supervised(tmp_path / "all", fakes, rounds)
    assert run.said.returncode == 0, run.said.stderr
    assert run.did == ["stop", *SET_UP]
    # Hosts that cannot be set up are no mistake of this job; what m4 says of it then is.
    (fakes / "calls").unlink()
    (fakes / "refuse").touch()  # to copy the code
    run = Supervised(
        tmp_path / "some",
        fakes,
        ["ACTIVE: refused none", "ACTIVE: refused none"],
        "--max_restarts=1",
    )
    assert run.said.returncode == 1
    assert "could not be set up: failure 2" in run.said.stderr
    assert run.did == ["stop", "copy"] * 2
    (fakes / "calls").unlink()
    (fakes / "refuse").unlink()
    run = Supervised(
        tmp_path / "still", fakes, ["ACTIVE: refused refused", "ACTIVE: failed_2 failed_2"]
    )
    assert run.said.returncode == 2
    assert run.did == ["stop", *SET_UP, "stop"]


def test_a_host_and_supervise_agree_on_a_refused_job(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host, whose commands are run here: m4 refuses what it is given, and then not any more."""
    monkeypatch.delenv("JAX_PLATFORMS")
    make_program(tmp_path / "m4-env" / "bin" / "m4", 'case "$*" in *wrong*) exit 2 ;; esac')
    (tmp_path / "m4-env" / ".ready").touch()
    shutil.copytree(SCRIPTS, tmp_path / "here" / "scripts")
    # A slice of one host: this machine; `setup` there is the made-up uv's, the code is kept.
    make_program(
        fakes / "gcloud",
        f'echo "$@" >>"{fakes}/calls"\n'
        'case "$*" in\n'
        '  *" describe "*) echo ACTIVE ;;\n'
        '  *" ssh "*)\n'
        '    all="$*" command=${all##*--command=}\n'
        f'    cd "{tmp_path}"\n'
        '    case $command in *"tpu_host.sh setup") ;; *) eval "$command" ;; esac\n'
        "    ;;\n"
        "esac",
    )
    make_program(fakes / "git", "true")
    (tmp_path / "m4").symlink_to(tmp_path / "here")

    def supervise(*arguments: str):
        script = tmp_path / "here" / "scripts" / "cloud_tpu.sh"
        options = (*slice_options("v4-8"), "--poll_seconds=1", "--", "train", *arguments)
        return call(script, "supervise", *options)

    assert supervise("wrong").returncode == 2
    (fakes / "calls").unlink()
    said = supervise("right")
    assert said.returncode == 0, said.stderr
    assert "will retry once, with this commit" in said.stderr
    assert done(fakes) == ["stop", *SET_UP]


def test_supervise_refuses_another_job_of_that_name(tmp_path: Path, fakes: Path) -> None:
    run = Supervised(tmp_path, fakes, ["ACTIVE: none none", "ACTIVE: running other"])
    assert run.said.returncode == 2
    *_, line = run.said.stderr.splitlines()
    assert "big has a job 'train' with other arguments" in line
    assert "--job=NAME" in line
    assert run.did == ["stop", "start"], "it leaves the other one alone"


def test_supervise_asks_for_the_job_with_its_arguments() -> None:
    asked = [
        remote(words)
        for words in dry("cloud_tpu.sh", "supervise", *slice_options(), *TRAIN)
        if "tpu_host.sh status" in " ".join(words)
    ]
    assert len(asked) == 1
    assert f"tpu_host.sh status train {shlex.join(TRAIN[1:])};" in asked[0]
    # `status` reports any job of that name.
    (_, words) = dry("cloud_tpu.sh", "status", *slice_options())
    assert "tpu_host.sh status train;" in remote(words)
    said = call("cloud_tpu.sh", "supervise", "--dry_run", *slice_options(), *TRAIN)
    assert "# where a host has a job train with other arguments: refuses, --job=NAME" in said.stdout

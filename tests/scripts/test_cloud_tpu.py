"""cloud_tpu.sh: the commands for slices; `supervise` and `wait` with a made-up cloud."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.scripts.cloud import (
    EVERY_DRY_RUN,
    SCRIPTS,
    TRAIN,
    call,
    dry,
    make_program,
    remote,
    slice_options,
)

CLOUD_OF_FILES = """
echo "$@" >>"$fake/calls"
next() { head -n 1 "$fake/$1"; sed -i 1d "$fake/$1"; }
case "$*" in
  *" describe "*)
    state=$(next states)
    if [[ $state == NOT_FOUND ]]; then echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1; fi
    if [[ $state == down ]]; then echo "ERROR: could not reach it" >&2; exit 1; fi
    echo "$state"
    ;;
  *" scp "*) [[ ! -e $fake/refuse ]] ;;
  *" status "*)
    said=$(next jobs)
    if [[ $said == unreachable ]]; then exit 255; fi
    host=0
    for state in $said; do echo "m4-job host-$((host++)) ${state//_/ }"; done
    ;;
esac
"""


def test_create_asks_for_a_queued_resource() -> None:
    assert dry("cloud_tpu.sh", "create", *slice_options("v4-128")) == [
        [
            *["gcloud", "compute", "tpus", "queued-resources", "create", "big"],
            *["--zone=us-central2-b", "--node-id=big", "--accelerator-type=v4-128"],
            "--runtime-version=tpu-ubuntu2204-base",
        ]
    ]
    (words,) = dry(
        "cloud_tpu.sh", "create", *slice_options("v5e-256"), "--spot", "--project=p", "--", "--x=y"
    )
    assert words[5:] == [
        *["big", "--zone=us-central2-b", "--project=p", "--node-id=big"],
        *["--accelerator-type=v5litepod-256", "--runtime-version=v2-alpha-tpuv5-lite"],
        *["--spot", "--x=y"],
    ]


def test_commands_name_slice_and_zone_and_jobs_run_on_all_hosts() -> None:
    for arguments in EVERY_DRY_RUN:
        if arguments[0] == "cloud_tpu.sh":
            for words in dry(*arguments):
                if words[0] == "gcloud":
                    assert "--zone=us-central2-b" in words
                    assert {"big", "big:m4.tar.gz"} & set(words)
                if "ssh" in words or "scp" in words:
                    worker = "3" if "logs" in arguments else "all"
                    assert f"--worker={worker}" in words


class Supervised:
    """`supervise` in a copy of the scripts, over states of the slice and of its hosts' job."""

    def __init__(self, folder: Path, fakes: Path, rounds: list[str], *options: str):
        """rounds: "STATE" or "ACTIVE: what each host says"; the next look each."""
        shutil.copytree(SCRIPTS, folder / "repository" / "scripts")
        states = [text.split(":")[0] for text in rounds]
        jobs = [text.split(":")[1].strip() for text in rounds if ":" in text]
        (fakes / "states").write_text("".join(f"{state}\n" for state in states))
        (fakes / "jobs").write_text("".join(f"{said}\n" for said in jobs))
        make_program(fakes / "gcloud", f'fake="{fakes}"\n{CLOUD_OF_FILES}')
        make_program(fakes / "git", "true")
        self.said = call(
            folder / "repository" / "scripts" / "cloud_tpu.sh",
            "supervise",
            *slice_options(),
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
        "tpu-vm scp": "copy",
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
        options = (*slice_options(), "--poll_seconds=1", "--", "train", *arguments)
        return call(script, "supervise", *options)

    assert supervise("wrong").returncode == 2
    (fakes / "calls").unlink()
    said = supervise("right")
    assert said.returncode == 0, said.stderr
    assert "it is tried once more, with this commit" in said.stderr
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


def test_setup_refuses_uncommitted_changes(tmp_path: Path, fakes: Path) -> None:
    make_program(fakes / "git", 'if [[ $* == *status* ]]; then echo " M m4/jobs.py"; fi')
    said = call("cloud_tpu.sh", "setup", "--name=big", "--zone=us-central2-b")
    assert said.returncode == 2
    assert "not committed" in said.stderr
    assert not (fakes / "calls").exists()


def test_wait_ends_with_the_state(tmp_path: Path, fakes: Path) -> None:
    make_program(fakes / "gcloud", f'fake="{fakes}"\n{CLOUD_OF_FILES}')
    for states, status in (("PROVISIONING\nACTIVE\n", 0), ("PROVISIONING\nFAILED\n", 1)):
        (fakes / "states").write_text(states)
        said = call("cloud_tpu.sh", "wait", *slice_options(), "--poll_seconds=0")
        assert said.returncode == status
        assert (fakes / "states").read_text() == ""

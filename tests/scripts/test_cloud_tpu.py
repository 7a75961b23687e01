"""cloud_tpu.sh: its commands for slices, and `wait` and `launch` with a made-up gcloud."""

import math
import shlex
import shutil
from pathlib import Path

import pytest

from tests.documents.commands import write_program
from tests.scripts.cloud import SLICES, TRAIN, call, described, dry, slice_options


def test_create_asks_for_a_queued_resource() -> None:
    create = shlex.split("gcloud compute tpus queued-resources create big --zone=us-central2-b")
    assert dry("cloud_tpu.sh", "create", *slice_options("v4-128")) == [
        [*create, "--node-id=big", "--accelerator-type=v4-128",
         "--runtime-version=tpu-ubuntu2204-base"],
    ]  # fmt: skip
    more = ("--spot", "--project=p", "--gcloud=--x=y z")
    assert dry("cloud_tpu.sh", "create", *slice_options("v5e-256"), *more) == [
        [*create, "--project=p", "--node-id=big", "--accelerator-type=v5litepod-256",
         "--runtime-version=v2-alpha-tpuv5-lite", "--spot", "--x=y z"],
    ]  # fmt: skip


def test_several_slices_are_one_queued_resource() -> None:
    (words,) = dry("cloud_tpu.sh", "create", *slice_options("v5e-256"), "--slices=3")
    assert {"--node-count=3", "--node-prefix=big"} <= set(words)
    assert "--node-id=big" not in words
    # Every host of every slice is set up and started: JAX reads which slice it is in from the VM.
    for command in ("setup", "start", "stop", "status"):
        job = TRAIN if command == "start" else ()
        words = dry("cloud_tpu.sh", command, *slice_options("v5e-256"), "--slices=3", *job)[-1]
        assert {"--node=all", "--worker=all"} <= set(words)
    (words,) = dry("cloud_tpu.sh", "logs", *slice_options(), "--slice_index=2", "--worker=7")
    assert {"--node=2", "--worker=7"} <= set(words)


def test_numbers_of_every_slice_agree() -> None:
    for name, (kind, _, chips) in SLICES.items():
        said = described()[name]
        topology = [int(part) for part in said["TOPOLOGY"].split("x")]
        assert len(topology) == (2 if kind in ("v5e", "v6e") else 3), name  # the torus
        assert math.prod(topology) == chips == int(said["HOSTS"]) * int(said["CHIPS"]), name
        assert topology == sorted(topology) or said["TOPOLOGY"] == "2x2x1", name
        # Only a slice of one host has other hosts than those of four chips.
        assert said["CHIPS"] == "4" or (said["HOSTS"] == "1" and said["CHIPS"] in "18"), name
        assert said["MACHINE"].endswith(f"-{said['CHIPS']}t"), name
        assert said["TYPE"] == name.replace("v5e", "v5litepod")


def test_hosts_without_external_addresses_are_reached() -> None:
    commands = dry("cloud_tpu.sh", "launch", *slice_options(), "--internal_ip", *TRAIN)
    commands += dry("cloud_tpu.sh", "logs", *slice_options(), "--internal_ip")
    reached = [words for words in commands if {"ssh", "scp"} & set(words)]
    assert len(reached) > 3
    assert all("--internal-ip" in words for words in reached)


def test_setup_refuses_uncommitted_changes(tmp_path: Path, fakes: Path) -> None:
    write_program(fakes / "git", 'if [[ $* == *status* ]]; then echo " M m4/jobs.py"; fi')
    said = call("cloud_tpu.sh", "setup", "--name=big", "--zone=us-central2-b")
    assert said.returncode == 2
    assert "not committed" in said.stderr
    assert not (fakes / "calls").exists()


# A gcloud that answers `describe` with the next line of a file.
DESCRIBES = """
echo "$@" >>"$fake/calls"
if [[ $* != *" describe "* ]]; then exit; fi
state=$(head -n 1 "$fake/states"); sed -i 1d "$fake/states"
if [[ $state == down ]]; then echo "ERROR: could not reach it" >&2; exit 1; fi
echo "$state"
"""


def wait(fakes: Path, states: list[str], command: str = "wait", *arguments: str):
    """Runs `wait` or `launch` while the queued resource goes through these states."""
    write_program(fakes / "gcloud", f'fake="{fakes}"\n{DESCRIBES}')
    (fakes / "states").write_text("".join(f"{state}\n" for state in states))
    said = call("cloud_tpu.sh", command, *slice_options(), "--poll_seconds=0", *arguments)
    assert (fakes / "states").read_text() == ""
    return said


def test_wait_ends_with_the_state(fakes: Path) -> None:
    assert wait(fakes, ["PROVISIONING", "ACTIVE"]).returncode == 0
    assert wait(fakes, ["PROVISIONING", "FAILED"]).returncode == 1
    # A success of gcloud's begins a new count of its failures.
    said = wait(fakes, ["down"] * 29 + ["PROVISIONING"] + ["down"] * 30)
    assert said.returncode == 1
    assert said.stderr.splitlines()[-1].endswith("failure 30 of at most 30")


def test_launch_starts_the_job_when_the_slice_is_there(fakes: Path) -> None:
    write_program(fakes / "git", "true")
    said = wait(fakes, ["WAITING_FOR_RESOURCES", "ACTIVE"], "launch", *TRAIN)
    assert said.returncode == 0, said.stderr
    calls = (fakes / "calls").read_text()
    steps = ["queued-resources create", "queued-resources describe", "queued-resources scp",
             "tpu_host.sh setup", f"tpu_host.sh start train {' '.join(TRAIN[1:])}"]  # fmt: skip
    places = [calls.index(step) for step in steps]
    assert places == sorted(places)


PROJECT = "gcloud has no project: --project=..., or gcloud config set project"
# gcloud 528's own words; "" where its first line is the one that is shown.
MISTAKES = {
    "ERROR: (gcloud.compute.tpus.queued-resources.describe) Error parsing [queued_resource].\n"
    "The [queued_resource] resource is not properly specified.\n"
    "Failed to find attribute [project]. The attribute can be set in the following ways:": PROJECT,
    "ERROR: (gcloud.compute) The required property [project] is not currently set.": PROJECT,
    "ERROR: (gcloud.compute) You do not currently have an active account selected.": (
        "ERROR: (gcloud.compute) You do not currently have an active account selected. "
        "(gcloud auth login)"
    ),
    "ERROR: (gcloud.compute) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied": "",
    "ERROR: INVALID_ARGUMENT: the accelerator v4-128 was not found in zone us-central2-b": (
        "ERROR: INVALID_ARGUMENT: the accelerator v4-128 was not found in zone us-central2-b; "
        "what this zone has: gcloud compute tpus accelerator-types list --zone=us-central2-b"
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_of_the_users_with_gcloud_ends_it_in_one_line(fakes: Path, text: str) -> None:
    write_program(fakes / "gcloud", f'echo "{text}" >&2; echo "More follows." >&2; exit 1')
    said = call("cloud_tpu.sh", "wait", *slice_options(), "--poll_seconds=0")
    assert (said.returncode, said.stderr) == (2, f"cloud_tpu.sh: {MISTAKES[text] or text}\n")


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("echo gs://bucket/data/1/manifest.json", 0),
        # This machine may lack a right that the hosts have.
        ('echo "ERROR: (gcloud.storage.ls) no permission" >&2; exit 1', 0),
        ('echo "ERROR: (gcloud.storage.ls) One or more URLs matched no objects." >&2; exit 1', 2),
    ],
)
def test_no_slice_is_requested_before_the_corpus_is_there(
    fakes: Path, answer: str, status: int
) -> None:
    write_program(fakes / "git", "true")
    write_program(
        fakes / "gcloud",
        f'echo "$@" >>"{fakes}/calls"\n'
        'case "$*" in\n'
        f'  "storage ls gs://bucket/data/*/manifest.json") {answer} ;;\n'
        '  *" describe "*) echo ACTIVE ;;\n'
        "esac",
    )
    corpus = "--gin.experiment.Data.data_dir='gs://bucket/data/'"
    said = call("cloud_tpu.sh", "launch", *slice_options(), *TRAIN, corpus)
    assert said.returncode == status, said.stderr
    calls = (fakes / "calls").read_text()
    assert (" create " in calls) == (status == 0)
    if status:
        line = "cloud_tpu.sh: no corpus at gs://bucket/data: m4 data prepare makes it, on a machine"
        assert said.stderr.splitlines()[-1].startswith(line)
    assert calls.count("storage ls") == 1


def test_gcloud_that_is_missing_is_one_line(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bash", "dirname", "basename", "timeout"):
        (tmp_path / "few" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "few" / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path / "few"))
    said = call("cloud_tpu.sh", "wait", *slice_options())
    assert said.returncode == 2
    assert said.stderr.startswith("cloud_tpu.sh: gcloud is not on the PATH")
    assert len(said.stderr.splitlines()) == 1

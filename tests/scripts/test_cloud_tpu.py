"""cloud_tpu.sh: the commands for slices; `supervise` and `wait` with a made-up cloud."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.scripts.cloud import (
    CLOUD_OF_FILES,
    EVERY_DRY_RUN,
    SLICES,
    TRAIN,
    call,
    described,
    dry,
    make_program,
    slice_options,
)


def test_create_asks_for_a_queued_resource() -> None:
    assert dry("cloud_tpu.sh", "create", *slice_options("v4-128")) == [
        [
            *["gcloud", "compute", "tpus", "queued-resources", "create", "big"],
            *["--zone=us-central2-b", "--node-id=big", "--accelerator-type=v4-128"],
            "--runtime-version=tpu-ubuntu2204-base",
        ]
    ]
    (words,) = dry(
        "cloud_tpu.sh",
        "create",
        *slice_options("v5e-256"),
        "--spot",
        "--project=p",
        "--gcloud=--x=y z",
    )
    assert words[5:] == [
        *["big", "--zone=us-central2-b", "--project=p", "--node-id=big"],
        *["--accelerator-type=v5litepod-256", "--runtime-version=v2-alpha-tpuv5-lite"],
        *["--spot", "--x=y z"],
    ]


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


@pytest.mark.parametrize("slice_name", SLICES)
def test_numbers_of_every_slice_agree(slice_name: str) -> None:
    kind, _, chips = SLICES[slice_name]
    said = described(slice_name)
    topology = [int(part) for part in said["TOPOLOGY"].split("x")]
    assert len(topology) == (2 if kind in ("v5e", "v6e") else 3)  # the torus
    assert math.prod(topology) == chips == int(said["HOSTS"]) * int(said["CHIPS"])
    assert topology == sorted(topology) or said["TOPOLOGY"] == "2x2x1"
    # Only a slice of one host has other hosts than those of four chips.
    assert said["CHIPS"] == "4" or (said["HOSTS"] == "1" and said["CHIPS"] in ("1", "8"))
    assert said["MACHINE"].endswith(f"-{said['CHIPS']}t")
    assert said["TYPE"] == slice_name.replace("v5e", "v5litepod")


@pytest.mark.parametrize("option", ["--internal_ip", "--tunnel_through_iap"])
def test_hosts_without_external_addresses_are_reached(option: str) -> None:
    commands = dry("cloud_tpu.sh", "supervise", *slice_options(), option, *TRAIN)
    commands += dry("cloud_tpu.sh", "logs", *slice_options(), option)
    reached = [words for words in commands if {"ssh", "scp"} & set(words)]
    assert len(reached) > 3
    flag = {"--internal_ip": "--internal-ip"}.get(option, "--tunnel-through-iap")
    assert all(flag in words for words in reached)


def test_commands_name_slice_and_zone_and_jobs_run_on_all_hosts() -> None:
    for arguments in EVERY_DRY_RUN:
        if arguments[0] == "cloud_tpu.sh":
            for words in dry(*arguments):
                if "gcloud" in words:
                    assert "--zone=us-central2-b" in words
                    assert {"big", "big:m4.tar.gz"} & set(words)
                if "ssh" in words or "scp" in words:
                    worker = "3" if "logs" in arguments else "all"
                    assert f"--worker={worker}" in words
                    assert "--node=all" in words or "logs" in arguments


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

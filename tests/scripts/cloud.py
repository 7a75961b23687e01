"""The scripts as tests call them, and programs that stand in for the cloud's."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
CLOUD = ("gcloud", "docker", "kubectl", "xpk")
TRAIN = ("--", "train", "--gin_file=gin_configs/v4_128.gin", "--model_dir=gs://bucket/big")


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

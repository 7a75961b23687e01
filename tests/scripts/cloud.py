"""The scripts as tests call them, and programs that stand in for the cloud's."""

import functools
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
CLOUD = ("gcloud", "docker", "kubectl", "xpk")
TRAIN = ("--", "train", "--gin_file=gin_configs/v4_128.gin", "--model_dir=gs://bucket/big")


def call(script: str | Path, *arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments], capture_output=True, text=True, timeout=120,
        check=False, **more,
    )  # fmt: skip


def dry(script: str, *arguments: str) -> list[list[str]]:
    """Returns the commands of a dry run as words; lines with # say when they are run."""
    command, *rest = arguments
    said = call(script, command, "--dry_run", *rest)
    assert said.returncode == 0, said.stderr
    assert not said.stderr
    lines = [line for line in said.stdout.splitlines() if not line.startswith("# ")]
    return [shlex.split(line) for line in lines]


def slice_options(slice_name: str = "v4-128") -> tuple[str, ...]:
    return ("--name=big", "--zone=us-central2-b", f"--slice={slice_name}")


# Every slice that the scripts know: kind, cores of a chip that a name counts, chips.
SLICES = {
    f"{kind}-{cores * chips}": (kind, cores, chips)
    for kind, cores, sizes in (
        ("v4", 2, [2**k for k in range(2, 12)]), ("v5e", 1, [1, *(2**k for k in range(2, 9))]),
        ("v5p", 2, [2**k for k in range(2, 13)]), ("v6e", 1, [1, *(2**k for k in range(2, 9))]),
        ("tpu7x", 2, [1, *(2**k for k in range(2, 13))]),
    )
    for chips in sizes
}  # fmt: skip


@functools.cache
def described() -> dict[str, dict[str, str]]:
    """Returns the scripts' variables of each slice: SLICE_TOPOLOGY, SLICE_HOSTS and the others."""
    names = ["TYPE", "RUNTIME", "TOPOLOGY", "HOSTS", "CHIPS", "GKE", "MACHINE"]
    text = " ".join(f"$SLICE_{name}" for name in names)
    said = subprocess.run(
        [
            *["bash", "-c"],
            f'source "{SCRIPTS}/common.sh"; for s in "$@"; do describe_slice $s; echo {text}; done',
            *["bash", *SLICES],
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [dict(zip(names, line.split(), strict=True)) for line in said.stdout.splitlines()]
    return dict(zip(SLICES, lines, strict=True))


def remote(words: list[str]) -> str:
    """Returns the command that an ssh command runs on the hosts."""
    (command,) = [word for word in words if word.startswith("--command=")]
    return command.removeprefix("--command=")


EVERY_DRY_RUN = [
    ("cloud_tpu.sh", "create", *slice_options(), "--spot", "--gcloud=--network=mine"),
    ("cloud_tpu.sh", "wait", *slice_options()), ("cloud_tpu.sh", "setup", *slice_options()),
    ("cloud_tpu.sh", "start", *slice_options(), *TRAIN),
    ("cloud_tpu.sh", "logs", *slice_options(), "--worker=3"),
    ("cloud_tpu.sh", "status", *slice_options(), "--job=train"),
    ("cloud_tpu.sh", "stop", *slice_options()),
    ("cloud_tpu.sh", "launch", *slice_options(), *TRAIN),
    ("cloud_tpu.sh", "launch", *slice_options(), "--slices=2", "--internal_ip", *TRAIN),
    ("cloud_tpu.sh", "delete", *slice_options()), ("gke.sh", "image", "--image=here/m4:1"),
    ("gke.sh", "pool", *slice_options(), "--cluster=c"),
    ("gke.sh", "pool", *slice_options("tpu7x-128"), "--cluster=c", "--slices=2"),
    ("gke.sh", "apply", "--name=big", "--slice=v5e-256", "--image=here/m4:1", *TRAIN),
    ("gke.sh", "xpk", *slice_options(), "--cluster=c", "--image=here/m4:1", *TRAIN),
    ("gke.sh", "status", "--name=big"), ("gke.sh", "logs", "--name=big"),
    ("gke.sh", "delete", "--name=big"),
]  # fmt: skip

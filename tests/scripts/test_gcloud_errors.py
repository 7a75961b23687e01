"""cloud_tpu.sh where gcloud itself fails: mistakes of the user's, and what a retry mends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripts.cloud import TRAIN, call, make_program, slice_options


@pytest.mark.parametrize("command", ["wait", "supervise"])
@pytest.mark.parametrize(
    "line",
    [
        "ERROR: (gcloud.compute) The required property [project] is not currently set.",
        "ERROR: (gcloud.compute) You do not currently have an active account selected.",
        "ERROR: (gcloud.compute) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied",
        "ERROR: (gcloud.compute) INVALID_ARGUMENT: zone",
    ],
)
def test_a_mistake_of_the_users_with_gcloud_ends_it_in_one_line(
    fakes: Path, command: str, line: str
) -> None:
    make_program(fakes / "gcloud", f'echo "{line}" >&2; echo "More follows." >&2; exit 1')
    job = TRAIN if command == "supervise" else ()
    said = call("cloud_tpu.sh", command, *slice_options(), "--poll_seconds=0", *job)
    assert (said.returncode, said.stderr) == (2, f"cloud_tpu.sh: {line}\n")


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


def test_gcloud_that_fails_again_and_again_is_counted_and_given_up(
    fakes: Path,
) -> None:
    make_program(
        fakes / "gcloud",
        f'state=$(head -n 1 "{fakes}/states"); sed -i 1d "{fakes}/states"\n'
        'if [[ $state == down ]]; then echo "ERROR: could not reach it" >&2; exit 1; fi\n'
        'echo "$state"',
    )
    (fakes / "states").write_text("down\n" * 29 + "PROVISIONING\n" + "down\n" * 30)
    said = call("cloud_tpu.sh", "wait", *slice_options(), "--poll_seconds=0")
    assert said.returncode == 1
    assert said.stderr.count("failed 29 of at most 30 times") == 2  # a success begins a new count
    assert "gcloud failed 30 times without a break: given up" in said.stderr.splitlines()[-1]
    assert (fakes / "states").read_text() == ""

"""cloud_tpu.sh where gcloud itself fails: mistakes of the user's, and what a retry mends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripts.cloud import TRAIN, call, make_program, slice_options

# gcloud 528's own words; "" where its first line is the one that is shown.
MISTAKES = {
    "ERROR: (gcloud.compute.tpus.queued-resources.describe) Error parsing [queued_resource].\n"
    "The [queued_resource] resource is not properly specified.\n"
    "Failed to find attribute [project]. The attribute can be set in the following ways:": (
        "gcloud has no project: --project=..., or gcloud config set project"
    ),
    "ERROR: (gcloud.compute) The required property [project] is not currently set.": (
        "gcloud has no project: --project=..., or gcloud config set project"
    ),
    "ERROR: (gcloud.compute) You do not currently have an active account selected.": (
        "ERROR: (gcloud.compute) You do not currently have an active account selected. "
        "(gcloud auth login)"
    ),
    "ERROR: (gcloud.compute) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied": "",
    "ERROR: (gcloud.compute) INVALID_ARGUMENT: zone": "",
}


@pytest.mark.parametrize("command", ["wait", "supervise"])
@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_of_the_users_with_gcloud_ends_it_in_one_line(
    fakes: Path, command: str, text: str
) -> None:
    make_program(fakes / "gcloud", f'echo "{text}" >&2; echo "More follows." >&2; exit 1')
    job = TRAIN if command == "supervise" else ()
    said = call("cloud_tpu.sh", command, *slice_options(), "--poll_seconds=0", *job)
    assert (said.returncode, said.stderr) == (2, f"cloud_tpu.sh: {MISTAKES[text] or text}\n")


NO_SLICES = (
    "ERROR: (gcloud.compute.tpus.queued-resources.create) INVALID_ARGUMENT: Cloud TPU received "
    "a bad request. the accelerator v4-128 was not found in zone us-central2-b [EID: 0x9]"
)


@pytest.mark.parametrize("command", ["create", "supervise"])
def test_a_zone_without_such_slices_is_one_line_that_says_what_lists_them(
    fakes: Path, command: str
) -> None:
    make_program(
        fakes / "gcloud",
        'case "$*" in\n'
        '  *" describe "*) echo "ERROR: NOT_FOUND: no such resource" >&2 ;;\n'
        f'  *) echo "{NO_SLICES}" >&2 ;;\n'
        "esac; exit 1",
    )
    job = TRAIN if command == "supervise" else ()
    said = call("cloud_tpu.sh", command, *slice_options(), "--poll_seconds=0", *job)
    assert said.returncode == 2
    *before, line = said.stderr.splitlines()
    assert before == ["cloud_tpu.sh: big is NONE"] * (command == "supervise")
    assert line == (
        f"cloud_tpu.sh: {NO_SLICES}; what this zone has: "
        "gcloud compute tpus accelerator-types list --zone=us-central2-b"
    )


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("echo gs://bucket/data/manifest.json", 0),
        # This machine may lack a right that the hosts have.
        ('echo "ERROR: (gcloud.storage.ls) no permission" >&2; exit 1', 0),
        ('echo "ERROR: (gcloud.storage.ls) One or more URLs matched no objects." >&2; exit 1', 2),
    ],
)
def test_no_slice_is_requested_before_the_corpus_is_there(
    fakes: Path, answer: str, status: int
) -> None:
    made = fakes / "made"
    make_program(
        fakes / "gcloud",
        f'echo "$@" >>"{fakes}/calls"\n'
        'case "$*" in\n'
        f'  "storage ls gs://bucket/data/manifest.json") {answer} ;;\n'
        f'  *" create "*) touch "{made}" ;;\n'
        f'  *" describe "*) [[ -e "{made}" ]] || {{ echo NOT_FOUND; exit 1; }}; echo ACTIVE ;;\n'
        '  *" ssh "*) for host in {1..16}; do echo "m4-job $host finished"; done ;;\n'
        "esac",
    )
    corpus = "--gin.experiment.Data.data_dir='gs://bucket/data/'"
    said = call("cloud_tpu.sh", "supervise", *slice_options(), "--poll_seconds=0", *TRAIN, corpus)
    assert said.returncode == status, said.stderr
    assert made.exists() == (status == 0)
    if status:
        line = "cloud_tpu.sh: no corpus at gs://bucket/data: m4 data prepare makes it, on a machine"
        assert said.stderr.splitlines()[-1].startswith(line)
    assert (fakes / "calls").read_text().count("storage ls") == 1


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

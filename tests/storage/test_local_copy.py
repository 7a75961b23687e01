"""A run's folder in a bucket, and the copies in which jobs of several machines work."""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from m4.settings import InputError
from m4.storage import local_copy as copies
from m4.storage import locks, run_folder
from m4.storage.files import write_text
from m4.storage.local_copy import LocalCopy, fetched
from m4.storage.locks import Busy
from m4.storage.objects import Objects
from tests.bucket import Emulator
from tests.storage.conftest import Capture, Machine, Patch, folder_of


class Lost(BaseException):
    pass


def copy_for(address: str, *kinds: str) -> LocalCopy:
    return LocalCopy(address, kinds or ("train",), run_folder.kind_of, f"MODEL_DIR = {address}")


def test_a_bucket_equals_the_copy_and_another_machine_gets_it(
    address: str, emulator: Emulator, machine: Machine
) -> None:
    copy = copy_for(address)
    with copy.locked():
        (copy.here / "tensorboard").mkdir()
        (copy.here / "tensorboard" / "a").write_text("one\n", encoding="utf-8")
        (copy.here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        for hidden in (".unfinished.12", "checkpoints/1/params", "data/1/manifest.json"):
            (copy.here / hidden).parent.mkdir(parents=True, exist_ok=True)
            (copy.here / hidden).write_text("no", encoding="utf-8")
        copies.upload(copy.here / "checkpoints")
        assert emulator.names(folder_of(address)) == {
            "tensorboard/a", "metrics.jsonl", ".running/train.json"
        }  # fmt: skip
        there = copy.objects.list()
        copies.upload(copy.here)  # nothing has changed: nothing is uploaded but the lock
        assert {n: o for n, o in copy.objects.list().items() if there[n] != o}.keys() <= {
            ".running/train.json"
        }
        changed = copy.here / "metrics.jsonl"
        before = changed.stat().st_mtime_ns
        changed.write_text("2\n", encoding="utf-8")  # as long as it was
        os.utime(changed, ns=(before, before + 1))
        (copy.here / "tensorboard" / "a").unlink()
    assert emulator.names(folder_of(address)) == {"metrics.jsonl"}
    machine()
    assert (fetched(address) / "metrics.jsonl").read_text(encoding="utf-8") == "2\n"
    other = copy_for(address)
    with other.locked():
        (other.here / "metrics.jsonl").unlink()
    assert not (fetched(address) / "metrics.jsonl").exists()
    assert fetched("runs/demo") == Path("runs/demo")


def test_changes_are_uploaded_while_the_job_works(address: str, emulator: Emulator) -> None:
    copy = copy_for(address)
    with copy.locked():
        (copy.here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        until = time.monotonic() + 20
        while "metrics.jsonl" not in emulator.names(folder_of(address)):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_jobs_write_files_of_different_kinds(
    address: str, emulator: Emulator, machine: Machine
) -> None:
    """Each uploads and removes its own alone, on one machine or two."""
    trains = copy_for(address)
    with trains.locked():
        (trains.here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        copies.upload(trains.here)
        for another in (False, True):
            if another:
                machine()
            with pytest.raises(Busy, match="another m4 job is at work there"):
                copy_for(address).locked().__enter__()
            evaluates = copy_for(address, "eval")
            with evaluates.locked():
                assert (evaluates.here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"
                (evaluates.here / "metrics.jsonl").write_text("by mistake", encoding="utf-8")
                (evaluates.here / "scores.jsonl").write_text("{}\n", encoding="utf-8")
        (trains.here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
    assert emulator.names(folder_of(address)) == {"metrics.jsonl", "scores.jsonl"}
    assert emulator.read(f"{folder_of(address)}/metrics.jsonl") == b"1\n2\n"


def test_checkpoints_of_baselines_are_files_that_their_jobs_alone_download(
    address: str, emulator: Emulator, machine: Machine
) -> None:
    """They are trained on one machine, in its copy."""
    name = "baselines/gl.1/checkpoints/4/params/a"
    copy = copy_for(address, "baselines")
    assert copies.address_of(copy.here / "baselines" / "gl.1") == copy.here / "baselines" / "gl.1"
    with copy.locked():
        (copy.here / name).parent.mkdir(parents=True)
        (copy.here / name).write_bytes(b"params")
    assert emulator.names(folder_of(address)) == {name}
    machine()
    assert not (fetched(address) / name).exists()
    copy = copy_for(address, "baselines")
    with copy.locked():
        assert (copy.here / name).read_bytes() == b"params"


def test_programs_are_downloaded_by_the_folders_jobs_alone(address: str, machine: Machine) -> None:
    """They are run: whoever reads a stranger's folder must not."""
    program = "compilation_cache/train/a-cache"
    copy = copy_for(address)
    with copy.locked():
        (copy.here / program).parent.mkdir(parents=True)
        (copy.here / program).write_bytes(b"program")
    machine()
    assert not (fetched(address) / program).exists()
    with copy_for(address, "eval").locked():
        assert not (copy_for(address, "eval").here / program).exists()
    umask = os.umask(0o002)
    try:
        copy = copy_for(address)
        with copy.locked():
            assert (copy.here / program).read_bytes() == b"program"
    finally:
        os.umask(umask)
    assert (copy.here / program).parent.stat().st_mode & 0o777 == 0o700
    machine()
    assert (fetched(address, program.__eq__) / program).read_bytes() == b"program"


@pytest.mark.parametrize("absolute", [False, True])
def test_names_stay_in_the_folder(
    address: str, emulator: Emulator, tmp_path: Path, absolute: bool
) -> None:
    """Neither a damaged record nor a stranger's bucket names what is written or deleted."""
    copy, victim = copy_for(address), tmp_path / "victim.txt"
    victim.write_text("precious", encoding="utf-8")
    copy.here.mkdir(parents=True)
    name = str(victim) if absolute else os.path.relpath(victim, copy.here)
    (copy.here / ".bucket.json").write_text(json.dumps({name: [9, "1", "1"]}), encoding="utf-8")
    with pytest.raises(InputError, match=r"victim\.txt', which is outside"):
        copy.locked().__enter__()
    assert victim.read_text(encoding="utf-8") == "precious"
    (copy.here / ".bucket.json").unlink()
    (copy.here / "link").symlink_to(tmp_path)
    emulator.write(f"{folder_of(address)}/link/victim.txt", b"theirs")
    with copy.locked():
        pass
    assert victim.read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("newer", [False, True])
def test_what_a_killed_job_did_not_upload_stays_unless_the_bucket_has_newer(
    address: str, emulator: Emulator, machine: Machine, newer: bool
) -> None:
    copy = copy_for(address)
    with copy.locked():
        (copy.here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
    (copy.here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
    if newer:
        emulator.write(f"{folder_of(address)}/metrics.jsonl", b"other\n")
    with copy.locked():
        pass
    found = emulator.read(f"{folder_of(address)}/metrics.jsonl")
    assert found == (b"other\n" if newer else b"1\n2\n")


def test_a_job_whose_lock_was_taken_over_writes_nothing_more(
    address: str, emulator: Emulator, monkeypatch: Patch, machine: Machine
) -> None:
    ended: list[int] = []

    def end(status: int) -> None:
        ended.append(status)
        raise Lost

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(locks, "PERIOD_SECONDS", 1000.0)
    copy = copy_for(address)
    with contextlib.suppress(Lost), copy.locked():
        mark = json.dumps({"job": "another", "host": "elsewhere", "pid": 7, "copy": "a copy"})
        emulator.write(f"{folder_of(address)}/.running/train.json", mark.encode())
        emulator.write(f"{folder_of(address)}/metrics.jsonl", b"1\n2 of the other\n")
        (copy.here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
        (copy.here / "atlas.train.json").write_text("{}", encoding="utf-8")
        with pytest.raises(Lost):
            copies.upload(copy.here / "checkpoints")
        with pytest.raises(Lost):
            copy.clear(lambda name: True)
    assert {*ended} == {locks.LOST_STATUS}
    assert emulator.names(folder_of(address)) == {"metrics.jsonl", ".running/train.json"}
    assert emulator.read(f"{folder_of(address)}/metrics.jsonl") == b"1\n2 of the other\n"
    # The next job here goes on with what the other one left.
    Objects(address).delete(".running/train.json")
    copy = copy_for(address)
    with copy.locked():
        assert (copy.here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2 of the other\n"
        assert not (copy.here / "atlas.train.json").exists()


def out_of_reach(monkeypatch: Patch, times: int) -> list[str]:
    """Makes the first `times` uploads fail; returns those."""
    work, failed = Objects.put, list[str]()

    def put(self: Objects, name: str, source: Any) -> str:
        if len(failed) < times:
            failed.append(name)
            raise OSError("no network")
        return work(self, name, source)

    monkeypatch.setattr(Objects, "put", put)
    return failed


def test_a_bucket_that_is_not_reached_is_tried_again(
    address: str, emulator: Emulator, monkeypatch: Patch, capsys: Capture
) -> None:
    copy = copy_for(address)
    with copy.locked():
        (copy.here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        failed = out_of_reach(monkeypatch, 2)
        copies.upload(copy.here)
        assert "metrics.jsonl" in emulator.names(folder_of(address))
    assert len(failed) == 2
    assert "not up to date, will retry (no network)" in capsys.readouterr().err


@pytest.mark.parametrize("failing", [False, True])
def test_last_files_that_cannot_be_uploaded_are_kept_and_named(
    address: str, emulator: Emulator, failing: bool, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(locks, "PERIOD_SECONDS", 0.05)
    copy = copy_for(address)

    def work() -> None:
        with copy.locked():
            (copy.here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
            out_of_reach(patch, 10**6)
            if failing:
                raise KeyError("a bug")

    line = rf"last files could not be uploaded \(no network\); they are in {copy.here}, and the"
    with Patch.context() as patch:
        if failing:  # that is what the job ends with
            with pytest.raises(KeyError, match="a bug"):
                work()
            assert re.search(line, capsys.readouterr().err)
        else:
            with pytest.raises(match=line):
                work()
    assert emulator.names(folder_of(address)) == set()
    with copy.locked():
        pass
    assert emulator.names(folder_of(address)) == {"metrics.jsonl"}


def test_a_file_rewritten_within_a_tick_of_the_clock_is_uploaded(
    address: str, emulator: Emulator
) -> None:
    copy = copy_for(address)
    path = copy.here / "metrics.jsonl"
    with copy.locked():
        for text in ("1\n", "2\n"):
            write_text(path, text)
            os.utime(path, ns=(0, 10**18))  # the same size and time
            copies.upload(copy.here)
            assert emulator.read(f"{folder_of(address)}/metrics.jsonl") == text.encode()

"""A model's folder in a store: the working copy, and whole jobs. A disk stands in for the store."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from m4.storage import lease, remote, run_folder, working_copy
from tests.storage.disk_store import another_machine, files, marks, take_over


def test_working_copy_of_another_address_is_refused(tmp_path: Path, store: Path) -> None:
    """A run's folder from elsewhere cannot name what is written and deleted."""
    store.mkdir(parents=True)
    theirs = tmp_path / "downloads" / "run"
    theirs.mkdir(parents=True)
    (theirs / remote.MARK).write_text(f"file://{store}\na name\n", encoding="utf-8")
    for use in (remote.fetch, remote.remote_path, lambda folder: remote.locked(folder).__enter__()):
        with pytest.raises(ValueError, match=f"names file://{store}, whose working copy is"):
            use(theirs)


@pytest.mark.parametrize("absolute", [False, True])
def test_names_of_the_record_stay_in_the_folder(
    store: Path, here: Path, tmp_path: Path, absolute: bool
) -> None:
    victim = here.parent / "victim.txt"
    victim.write_text("precious", encoding="utf-8")
    store.mkdir(parents=True)
    name = str(victim) if absolute else "../victim.txt"
    (here / ".remote.json").write_text(json.dumps({name: [9, 1, 1, 1]}), encoding="utf-8")
    for use in (remote.fetch, lambda folder: remote.locked(folder).__enter__()):
        with pytest.raises(ValueError, match=r"victim\.txt', which is outside"):
            use(here)
    assert victim.read_text(encoding="utf-8") == "precious"


def test_address_has_one_working_copy(store: Path, here: Path, tmp_path: Path) -> None:
    assert here.parent == tmp_path / "home" / "m4"
    assert here.name.startswith("run.")
    assert remote.local(f"file://{store}/") == here != remote.local(f"file://{store}2")
    assert str(remote.remote_path(here / "checkpoints")) == f"{store}/checkpoints"
    assert str(remote.remote_path(here / "compare" / "dense")) == f"{store}/compare/dense"
    assert remote.local("runs/demo") == Path("runs/demo")
    assert str(remote.remote_path(tmp_path / "runs" / "demo")) == str(tmp_path / "runs" / "demo")


def test_files_are_shown_by_their_address_and_where_they_can_be_opened(
    store: Path, here: Path, tmp_path: Path
) -> None:
    path = here / "decodes" / "a.jsonl"
    assert remote.shown_file(path) == f"{store}/decodes/a.jsonl, here {path}"
    for local in (tmp_path / "runs" / "a.jsonl", Path("runs/a.jsonl")):
        assert remote.shown_file(local) == str(local)


def test_store_equals_the_copy_and_another_copy_gets_it(
    store: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote.locked(here):
        (here / "decodes").mkdir()
        (here / "decodes" / "a.jsonl").write_text("one\n", encoding="utf-8")
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        (here / ".unfinished.12").write_text("no", encoding="utf-8")
        remote.push(here / "checkpoints")
        assert (store / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"
        assert len(marks(store)) == 1
        with (here / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write("2\n")
        (here / "decodes" / "a.jsonl").unlink()
    assert files(store).keys() == {"metrics.jsonl"}, "neither what is hidden nor what is gone"
    other = another_machine(monkeypatch, tmp_path, store)
    remote.fetch(other)
    assert (other / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"
    with remote.locked(other):
        (other / "metrics.jsonl").unlink()
    remote.fetch(here)
    assert not (here / "metrics.jsonl").exists()


def test_changes_are_uploaded_while_the_job_works(store: Path, here: Path) -> None:
    with remote.locked(here):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        for _ in range(200):
            if (store / "metrics.jsonl").exists():
                break
            threading.Event().wait(0.05)
        assert (store / "metrics.jsonl").exists()


def test_reader_does_not_replace_files_of_a_job_of_this_machine(store: Path, here: Path) -> None:
    with remote.locked(here):
        metrics = (here / "metrics.jsonl").open("a", encoding="utf-8")
        metrics.write("1\n")
        metrics.flush()
        remote.push(here)
        (store / "metrics.jsonl").write_text("of another machine\n", encoding="utf-8")
        remote.fetch(here)
        with metrics:
            metrics.write("2\n")
        assert (here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"


def test_what_a_killed_job_did_not_upload_stays(store: Path, here: Path) -> None:
    with remote.locked(here):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
    (here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
    with remote.locked(here):
        assert (here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"
    assert (store / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"


def test_one_job_at_a_time_over_all_machines(
    store: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote.locked(here):
        other = another_machine(monkeypatch, tmp_path, store)
        with pytest.raises(ValueError, match="another m4 job is at work there"):
            remote.locked(other).__enter__()
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
    assert not marks(store)
    with remote.locked(other):
        assert (other / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"


def test_jobs_of_two_machines_write_files_of_other_kinds(
    store: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each uploads and removes its own alone, and sees the other's as they were at its start."""
    with run_folder.locked(here, "train"):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        remote.push(here)
        other = another_machine(monkeypatch, tmp_path, store)
        with run_folder.locked(other, "eval"):
            assert (other / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"
            (other / "metrics.jsonl").write_text("by mistake", encoding="utf-8")
            (other / "scores.jsonl").write_text("{}\n", encoding="utf-8")
            with pytest.raises(lease.Busy):
                run_folder.locked(other, "train", wait=False).__enter__()
        (here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
    assert files(store) == {"metrics.jsonl": b"1\n2\n", "scores.jsonl": b"{}\n"}


def test_job_of_this_machine_keeps_its_files_while_another_one_starts(
    store: Path, here: Path
) -> None:
    with run_folder.locked(here, "train"):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        remote.push(here)
        (here / "metrics.jsonl").unlink()  # it is being written
        (store / "scores.jsonl").write_text("of another machine\n", encoding="utf-8")
        with run_folder.locked(here, "eval"):
            assert not (here / "metrics.jsonl").exists()
            assert (here / "scores.jsonl").exists()


def test_compiled_programs_are_downloaded_by_the_folders_jobs_alone(
    store: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are run: whoever reads a stranger's folder must not."""
    program = "compilation_cache/train/a-cache"
    with run_folder.locked(here, "train"):
        (here / program).parent.mkdir(parents=True)
        (here / program).write_bytes(b"program")
    other = another_machine(monkeypatch, tmp_path, store)
    remote.fetch(other)
    with run_folder.locked(other, "eval"):
        assert not (other / program).exists()
    umask = os.umask(0o002)
    try:
        with run_folder.locked(other, "train"):
            assert (other / program).read_bytes() == b"program"
    finally:
        os.umask(umask)
    assert (other / program).parent.stat().st_mode & 0o777 == 0o700


def test_job_that_lost_its_lease_ends_and_writes_nothing_more(store: Path, here: Path) -> None:
    there: dict[str, bytes] = {}

    def work() -> None:
        with remote.locked(here):
            (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
            remote.push(here)
            with (here / ".lock").open("w") as uploads:  # none has checked the lease just before
                fcntl.flock(uploads, fcntl.LOCK_EX)
                take_over(store)
                (store / "metrics.jsonl").write_text("1\n2 of the other\n", encoding="utf-8")
                there.update(files(store))
                (here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
                (here / "atlas.train.json").write_text("{}", encoding="utf-8")
                time.sleep(2 * lease.PERIOD_SECONDS)
            time.sleep(60)  # its signal wakes it
            raise AssertionError("it was not interrupted")

    with pytest.raises(lease.LeaseLost, match="taken it over"):
        work()
    assert files(store) == there
    (mark,) = marks(store)
    assert json.loads(mark.read_text(encoding="utf-8"))["job"] == "another"
    # A job here continues with what the other one left.
    marks(store)[0].unlink()
    with remote.locked(here):
        assert (here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2 of the other\n"
        assert not (here / "atlas.train.json").exists()
    assert files(store) == there


def test_push_checks_the_lease_first(
    store: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 1000.0)

    def work() -> None:
        with remote.locked(here):
            take_over(store)
            (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
            with pytest.raises(lease.LeaseLost):
                remote.push(here / "checkpoints")
            assert remote.lease_lost(here / "checkpoints")
            with pytest.raises(lease.LeaseLost):
                remote.start_over(here)

    with pytest.raises(lease.LeaseLost):
        work()
    assert files(store) == {}
    assert not remote.lease_lost(here)


def out_of_reach(monkeypatch: pytest.MonkeyPatch, what: str, times: int) -> list[str]:
    """Makes the first `times` calls of a method of working copies fail; a list of those."""
    work = getattr(working_copy.WorkingCopy, what)
    failed: list[str] = []

    def fails(self: Any, *arguments: Any) -> Any:
        if len(failed) < times:
            failed.append(what)
            raise OSError("no network")
        return work(self, *arguments)

    monkeypatch.setattr(working_copy.WorkingCopy, what, fails)
    return failed


def test_failed_download_releases_the_lease(
    store: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_reach(monkeypatch, "pull", 1)
    with pytest.raises(OSError, match="no network"):
        remote.locked(here).__enter__()
    assert not marks(store)


def test_unreachable_store_is_retried(
    store: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with remote.locked(here):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        failed = out_of_reach(monkeypatch, "_put", 3)
        remote.push(here)
        assert (store / "metrics.jsonl").exists()
    assert len(failed) == 3
    assert "not up to date, will retry (no network)" in capsys.readouterr().err


@pytest.mark.parametrize("failing", [False, True])
def test_last_files_that_cannot_be_uploaded_are_kept_and_reported(
    store: Path,
    here: Path,
    failing: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        with remote.locked(here):
            (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
            out_of_reach(monkeypatch, "_put", 10**6)
            if failing:
                raise KeyError("a bug")

    line = rf"last files could not be uploaded \(no network\); they are in {here}, and the same"
    if failing:  # that is what the job ends with
        with pytest.raises(KeyError, match="a bug"):
            work()
        (text,) = [shown for shown in capsys.readouterr().err.splitlines() if "last files" in shown]
        assert re.search(line, text)
    else:
        with pytest.raises(lease.UploadFailed, match=line):
            work()
    assert not marks(store), "the lease is released"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.parents[1]))
    with remote.locked(here):
        pass
    assert (store / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"

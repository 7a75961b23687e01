"""A job's log in its run folder's bucket; a disk stands in for the bucket."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from m4.storage import log_upload, remote
from m4.storage.store import open_store
from tests.bucket import BUCKET, Emulator


def followed(log: Path, target: Path, pid: int) -> threading.Thread:
    thread = threading.Thread(
        target=log_upload.follow, args=(log, f"file://{target}", pid, 0.05), daemon=True
    )
    thread.start()
    return thread


def test_growing_log_is_copied_until_its_process_has_ended(tmp_path: Path) -> None:
    log, target = tmp_path / "log", tmp_path / "bucket" / "run" / "logs" / "host" / "train.log"
    log.write_bytes(b"one\n")
    job = subprocess.Popen(["sleep", "60"])
    thread = followed(log, target, job.pid)
    try:
        for text in (b"one\n", b"one\ntwo\n"):
            log.write_bytes(text)
            end = time.monotonic() + 20
            while (not target.exists() or target.read_bytes() != text) and time.monotonic() < end:
                time.sleep(0.01)
            assert target.read_bytes() == text
        log.write_bytes(b"Traceback\n")
    finally:
        job.kill()
        job.wait()
    thread.join(20)
    assert not thread.is_alive()
    assert target.read_bytes() == b"Traceback\n"


def test_bucket_that_fails_is_reported_once_and_retried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, target = tmp_path / "log", tmp_path / "bucket"
    log.write_bytes(b"text")
    target.mkdir()  # a folder is where the file should be
    log_upload.follow(log, f"file://{target}", _ended(), 0.03)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"file://{target}: the log is not copied, will retry (")


def test_log_is_in_the_bucket_after_the_role_is_granted(
    tmp_path: Path, emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    log, folder = tmp_path / "log", f"gs://{BUCKET}/run/logs/host"
    log.write_bytes(b"text")
    emulator.rights.remove("storage.objects.create")
    log_upload.follow(log, f"{folder}/train.log", _ended(), 0.03)
    assert "lacks storage.objects.create: grant it roles/" in capsys.readouterr().err
    emulator.reset()
    log_upload.follow(log, f"{folder}/train.log", _ended(), 0.03)
    assert open_store(folder).read("train.log") == b"text"


def test_only_the_end_of_a_long_log_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_upload, "_LONGEST_BYTES", 4)
    (tmp_path / "log").write_bytes(b"123456")
    log_upload.follow(tmp_path / "log", f"file://{tmp_path}/copy", _ended())
    assert (tmp_path / "copy").read_bytes() == b"3456"


def test_logs_stay_in_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    store = tmp_path / "store"
    for name in ("run.json", "logs/host/train.log"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("{}")
    copy = remote.local(f"file://{store}")
    remote.fetch(copy)
    assert (copy / "run.json").exists()
    assert not (copy / "logs").exists()


def _ended() -> int:
    """A process that is no more."""
    job = subprocess.Popen(["true"])
    job.wait()
    assert not os.path.exists(f"/proc/{job.pid}")
    return job.pid

"""A job's log in its run folder's bucket."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from scripts import copy_log
from tests.bucket import Emulator
from tests.storage.conftest import folder_of


def test_a_growing_log_is_copied_until_its_process_has_ended(
    address: str, emulator: Emulator, tmp_path: Path
) -> None:
    log, target = tmp_path / "log", f"{address}/logs/host/train.log"
    log.write_bytes(b"one\n")
    job = subprocess.Popen(["sleep", "60"])
    thread = threading.Thread(target=copy_log.follow, args=(log, target, job.pid, 0.05))
    thread.start()
    try:
        for text in (b"one\n", b"one\ntwo\n"):
            log.write_bytes(text)
            end = time.monotonic() + 20
            while emulator.read(folder_of(target)) != text and time.monotonic() < end:
                time.sleep(0.01)
            assert emulator.read(folder_of(target)) == text
        log.write_bytes(b"Traceback\n")
    finally:
        job.kill()
        job.wait()
    thread.join(20)
    assert not thread.is_alive()
    assert emulator.read(folder_of(target)) == b"Traceback\n"


def test_a_log_that_cannot_be_copied_is_reported_once_and_retried(
    address: str,
    emulator: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = subprocess.Popen(["true"])
    job.wait()
    assert not os.path.exists(f"/proc/{job.pid}")
    monkeypatch.setattr(copy_log, "_LONGEST_BYTES", 4)
    (tmp_path / "log").write_bytes(b"123456")
    emulator.rights.remove("storage.objects.create")
    copy_log.follow(tmp_path / "log", f"{address}/train.log", job.pid, 0.03)
    (line,) = capsys.readouterr().err.splitlines()
    assert "the log is not copied, will retry (" in line
    assert "lacks storage.objects.create: grant it roles/" in line
    emulator.reset()
    copy_log.follow(tmp_path / "log", f"{address}/train.log", job.pid, 0.03)
    assert emulator.read(folder_of(f"{address}/train.log")) == b"3456", "the end of it"

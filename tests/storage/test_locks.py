"""One job at a time, on a disk and in a bucket; periods are short."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from m4.settings import InputError
from m4.storage import locks
from m4.storage.locks import BucketLock, Busy, local_lock
from m4.storage.objects import Objects
from tests.bucket import Emulator
from tests.storage.conftest import Capture, Patch, folder_of

Job = Callable[..., BucketLock]


class Lost(Exception):
    pass


def lost(said: str) -> None:
    raise Lost(said)


@pytest.fixture
def job(address: str) -> Job:
    """Makes locks of one folder in a bucket, each of another machine."""
    made: list[BucketLock] = []

    def make(kind: str = "train", copy: str | None = None) -> BucketLock:
        name = copy or f"copy {len(made)}"
        made.append(BucketLock(Objects(address), kind, name, "MODEL_DIR = there", lost))
        return made[-1]

    return make


def marks(emulator: Emulator, address: str) -> list[dict]:
    folder = f"{folder_of(address)}/{locks.RUNNING}"
    return [json.loads(emulator.read(f"{folder}/{name}")) for name in emulator.names(folder)]


def test_a_local_lock_is_for_one_process_and_no_link(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "run" / ".lock.train", tmp_path / "elsewhere"
    with local_lock(path, "MODEL_DIR = there"):
        with pytest.raises(Busy, match="MODEL_DIR = there: another m4 job is at work there"):
            local_lock(path, "MODEL_DIR = there").__enter__()
        with local_lock(path.with_name(".lock.eval"), "MODEL_DIR = there"):
            pass
    with local_lock(path, "MODEL_DIR = there"):
        pass
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises(InputError, match="MODEL_DIR = there: cannot be made or written"):
        local_lock(path, "MODEL_DIR = there").__enter__()
    assert not elsewhere.exists()


def test_a_lock_is_kept_by_renewing_it(
    job: Job, emulator: Emulator, address: str, capsys: Capture
) -> None:
    one = job()
    one.acquire()
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(locks.PERIOD_SECONDS / 3):
            one.check()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        who = rf"another m4 job is at work there \({one._mark['host']}, process \d+\)"
        with pytest.raises(Busy, match=who):
            job().acquire()
        assert "waiting to see whether it still runs" in capsys.readouterr().err
        with pytest.raises(Busy, match=who):
            job().acquire(wait=False)
        job("eval").acquire()
    finally:
        ended.set()
        thread.join()
    assert len(marks(emulator, address)) == 2
    one.release()
    assert len(marks(emulator, address)) == 1


def test_one_of_simultaneous_jobs_gets_the_lock(job: Job, monkeypatch: Patch) -> None:
    jobs = [job() for _ in range(4)]
    together, refused = threading.Barrier(len(jobs)), list[InputError]()

    def acquire(one: BucketLock) -> None:
        together.wait()
        try:
            one.acquire(wait=False)
        except InputError as error:
            refused.append(error)

    threads = [threading.Thread(target=acquire, args=(one,)) for one in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3


def test_a_killed_jobs_lock_expires_and_a_sleeping_one_ends(
    job: Job, emulator: Emulator, address: str
) -> None:
    one, other = job(), job()
    one.acquire()
    began = time.monotonic()
    other.acquire()
    assert time.monotonic() - began > locks.EXPIRED_PERIODS * locks.PERIOD_SECONDS
    one.check(older_than_seconds=1e9)  # it was renewed recently enough for that
    with pytest.raises(Lost, match=r"another job has taken it over \(.+, process \d+\); this one"):
        one.check()
    other.check()
    other.release()
    with pytest.raises(Lost, match=r"its .running/train.json is gone"):
        one.check()
    assert marks(emulator, address) == []


def test_a_job_does_not_wait_for_a_dead_one_of_the_same_copy(
    job: Job, emulator: Emulator, address: str, monkeypatch: Patch
) -> None:
    job(copy="the copy").acquire()
    monkeypatch.setattr(locks, "PERIOD_SECONDS", 1000.0)
    second = job(copy="the copy")
    second.acquire()
    second.check()
    assert len(marks(emulator, address)) == 1


def test_a_lock_whose_answer_was_lost_is_kept(job: Job, emulator: Emulator) -> None:
    """The client sends such a write again, which meets the job's own lock."""
    one = job()
    real = Objects.put_if
    calls = iter([True, False, True, False])

    def sometimes(self: Objects, *arguments: object) -> object:
        made = real(self, *arguments)  # type: ignore[arg-type]
        return real(self, *arguments) if next(calls, False) else made  # type: ignore[arg-type]

    with Patch.context() as patch:
        patch.setattr(Objects, "put_if", sometimes)
        one.acquire()
        one.check()
    one.check()

"""One job at a time in a store. A disk stands in for the store; periods are short."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from m4.storage import lease
from m4.storage.lease import Busy, Lease, LeaseLost
from m4.storage.store import ABSENT, Changed, Disk

PERIOD = 0.05


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lease, "PERIOD_SECONDS", PERIOD)
    # On a busy machine a lease of so short periods can be lost, and the signal would end pytest.
    before = signal.signal(lease.LEASE_LOST_SIGNAL, signal.SIG_IGN)
    yield
    signal.signal(lease.LEASE_LOST_SIGNAL, before)


class Store(Disk):
    """Counts writes; answers neither while `down`, nor to the writes that `lose_answers` names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}")
        self.writes, self.down, self.lose_answers = 0, False, set()

    def write(self, name: str, source: Path | bytes, version: str | None = None) -> str:
        if self.down:
            raise OSError("no network")
        made = super().write(name, source, version)
        self.writes += 1
        if self.writes in self.lose_answers:  # as Google's client, which then tries again
            return super().write(name, source, version)
        return made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Lease]]:
    """Makes leases of one folder, each with a separate working copy."""
    made: list[Lease] = []

    def make(kind: str = "train", copy: str | None = None, store: Store | None = None) -> Lease:
        name = copy or f"copy {len(made)}"
        store = store or Store(tmp_path / "store")
        made.append(Lease(store, kind, name, tmp_path / name, "MODEL_DIR = there"))
        return made[-1]

    yield make
    for one in made:
        one.release()


def marks(tmp_path: Path) -> list[dict]:
    """The leases in the store."""
    paths = (tmp_path / "store" / lease.RUNNING).glob("[!.]*.json")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def silence(one: Lease) -> None:
    """Ends its renewals, as if its machine had no network."""
    one._released.set()
    one._thread.join()


def taken_over(job: Callable[..., Lease]) -> tuple[Lease, Lease]:
    """One whose lease has expired, and the other that has taken it."""
    one, other = job(), job()
    one.acquire()
    silence(one)
    other.acquire()
    return one, other


def test_lease_is_renewed_and_released(job: Callable[..., Lease], tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    one = job(store=store)
    one.acquire()
    (mark,) = marks(tmp_path)
    assert mark["pid"] == os.getpid()
    before = store.writes
    while store.writes < before + 2:
        time.sleep(PERIOD)
    one.check()
    one.release()
    assert marks(tmp_path) == []


def test_second_job_is_refused(
    job: Callable[..., Lease], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = job()
    one.acquire()
    with pytest.raises(Busy, match="MODEL_DIR = there: another m4 job is at work there"):
        job().acquire()
    assert "was at work there; waiting whether it still is" in capsys.readouterr().err
    with pytest.raises(Busy):
        job().acquire(wait=False)
    assert not capsys.readouterr().err
    one.check()
    assert len(marks(tmp_path)) == 1


def test_jobs_of_other_kinds_work_at_the_same_time(
    job: Callable[..., Lease], tmp_path: Path
) -> None:
    for kind in ("train", "eval"):
        job(kind).acquire()
    assert len(marks(tmp_path)) == 2


def test_one_of_simultaneous_jobs_gets_the_lease(job: Callable[..., Lease]) -> None:
    for _ in range(3):
        jobs = [job() for _ in range(4)]
        together = threading.Barrier(len(jobs))
        refused: list[ValueError] = []

        def acquire(one: Lease, together: threading.Barrier, refused: list[ValueError]) -> None:
            together.wait()
            try:
                one.acquire()
            except ValueError as error:
                refused.append(error)

        threads = [threading.Thread(target=acquire, args=(one, together, refused)) for one in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        working = [one for one in jobs if one._thread.ident is not None]
        assert len(working) == 1
        assert len(refused) == 3
        working[0].check()
        working[0].release()


def test_silent_lease_expires(job: Callable[..., Lease], tmp_path: Path) -> None:
    one, other = job(), job()
    one.acquire()
    silence(one)
    began = time.monotonic()
    other.acquire()
    assert time.monotonic() - began >= (lease.SILENT_PERIODS - 1) * PERIOD
    with pytest.raises(LeaseLost, match=r"another job has taken it over \(.+, process \d+\)"):
        one.check()
    with pytest.raises(LeaseLost):
        one.check(older_than_seconds=1e9)
    one.release()
    other.check()
    assert len(marks(tmp_path)) == 1


def test_lease_that_expired_long_ago_is_taken_at_once(
    job: Callable[..., Lease], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job()
    one.acquire()
    silence(one)
    time.sleep((lease.SILENT_PERIODS + 1) * PERIOD)

    def no_wait(_: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(time, "sleep", no_wait)
    job().acquire(wait=False)


def test_check_renews_a_lease_that_was_not_renewed_for_so_long(
    job: Callable[..., Lease], tmp_path: Path
) -> None:
    """Else another job could take it over between the check and the write."""
    store = Store(tmp_path / "store")
    one = job(store=store)
    one.acquire()
    silence(one)
    before = store.writes
    one.check(older_than_seconds=1e9)
    assert store.writes == before
    one.check()
    assert store.writes == before + 1


def test_late_renewal_does_not_win(job: Callable[..., Lease], tmp_path: Path) -> None:
    one, other = taken_over(job)
    with pytest.raises(LeaseLost):
        one.check()
    other.check()
    assert [mark["job"] for mark in marks(tmp_path)] == [other._mark["job"]]


def test_removed_lease_is_lost(job: Callable[..., Lease], tmp_path: Path) -> None:
    # Another job may have come, changed things and ended.
    one, other = taken_over(job)
    other.release()
    with pytest.raises(LeaseLost, match="is gone"):
        one.check()
    assert marks(tmp_path) == []


def test_job_that_slept_while_acquiring_is_refused(
    job: Callable[..., Lease], tmp_path: Path
) -> None:
    other = job()

    class Slow(Store):
        def write(self, name: str, source: Path | bytes, version: str | None = None) -> str:
            if version != ABSENT:  # over the expired one; this job sleeps here
                other.acquire()
            return super().write(name, source, version)

    one = job()
    one.acquire()
    silence(one)
    with pytest.raises(Busy):
        job(store=Slow(tmp_path / "store")).acquire()
    other.check()
    assert len(marks(tmp_path)) == 1


def test_owner_of_a_copys_lock_does_not_wait_for_its_former_owner(
    job: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = job(copy="the copy"), job(copy="the copy")
    one.acquire()
    silence(one)
    monkeypatch.setattr(lease, "PERIOD_SECONDS", 1000.0)
    other.acquire()
    with pytest.raises(LeaseLost):
        one.check()


def test_written_lease_whose_answer_was_lost_is_kept(
    job: Callable[..., Lease], tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    store.lose_answers = {1, 3}
    one = job(store=store)
    one.acquire()
    while store.writes < 4:
        time.sleep(PERIOD)
    one.check()
    assert one.lost is None


def test_unreachable_store_is_a_warning_until_it_is_back(
    job: Callable[..., Lease], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    one = job(store=store)
    one.acquire()
    store.down = True
    time.sleep(4 * PERIOD)
    assert "not reached (no network)" in capsys.readouterr().err
    store.down = False
    before = store.writes
    while store.writes < before + 2:
        time.sleep(PERIOD / 2)
    one.check()


def test_disk_writes_only_over_the_version_that_is_known(tmp_path: Path) -> None:
    store = Disk(f"file://{tmp_path}")
    first = store.write("a/b", b"1", ABSENT)
    with pytest.raises(Changed):
        store.write("a/b", b"2", ABSENT)
    second = store.write("a/b", b"2", first)
    with pytest.raises(Changed):
        store.delete("a/b", first)
    assert store.read("a/b") == b"2"
    there = store.stat("a/b")
    assert there is not None
    assert there.version == second
    store.delete("a/b", second)
    assert store.read("a/b") is None

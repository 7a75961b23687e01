"""One job at a time in a store. A disk stands in for the store; periods are short."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etils import epath

from m4.storage import lease
from m4.storage.lease import Lease, LeaseLost

PERIOD = 0.05


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PERIOD_SECONDS", PERIOD)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Lease]]:
    """Makes leases of one folder, each with a separate working copy."""
    made: list[Lease] = []

    def make(kind: type[Lease] = Lease, copy: str | None = None) -> Lease:
        name = copy or f"copy {len(made)}"
        made.append(kind(epath.Path(tmp_path / "store"), name, tmp_path / name))
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
    one = job()
    one.acquire()
    (mark,) = marks(tmp_path)
    assert mark["working"]
    assert mark["pid"]
    before = mark["renewed"]
    for _ in range(200):
        time.sleep(PERIOD / 2)
        (mark,) = marks(tmp_path)
        if mark["renewed"] > before + 1:
            break
    assert mark["renewed"] > before + 1
    one.check()
    one.release()
    assert marks(tmp_path) == []


def test_second_job_is_refused_and_leaves_nothing(
    job: Callable[..., Lease], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = job()
    one.acquire()
    with pytest.raises(ValueError, match="another m4 job is at work there"):
        job().acquire()
    assert "was at work there; waiting whether it still is" in capsys.readouterr().err
    one.check()
    assert len(marks(tmp_path)) == 1


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
    assert time.monotonic() - began >= lease.SILENT_PERIODS * PERIOD
    with pytest.raises(LeaseLost, match=r"another job has taken it over \(.+, process \d+\)"):
        one.check()
    with pytest.raises(LeaseLost):
        one.check(older_than_seconds=1e9)
    other.check()
    assert [mark["number"] for mark in marks(tmp_path)] == [2]


def test_late_renewal_does_not_win(job: Callable[..., Lease], tmp_path: Path) -> None:
    # The other one came between its check and its write: so its file exists again.
    one, other = taken_over(job)
    one._renew()
    other.check()
    with pytest.raises(LeaseLost):
        one.check()
    other.check()
    assert len(marks(tmp_path)) == 1


def test_removed_mark_means_lost_lease(job: Callable[..., Lease], tmp_path: Path) -> None:
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

    class Sleepy(Lease):
        def _wait_until_expired(self) -> int:
            number = super()._wait_until_expired()
            other.acquire()  # this one counts as expired
            return number

    with pytest.raises(ValueError, match="another m4 job is at work there"):
        job(Sleepy).acquire()
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


def test_unreachable_store_is_a_warning_until_it_is_back(
    job: Callable[..., Lease], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = threading.Event()

    class Far(Lease):
        def _read(self) -> dict:
            if down.is_set():
                raise OSError("no network")
            return super()._read()

    one = job(Far)
    one.acquire()
    down.set()
    (before,) = marks(tmp_path)
    time.sleep(4 * PERIOD)
    with pytest.raises(OSError, match="no network"):
        one.check()
    assert "not reached (no network)" in capsys.readouterr().err
    # It renews nothing where it cannot check.
    assert marks(tmp_path)[0]["renewed"] - before["renewed"] <= 1
    down.clear()
    for _ in range(200):
        if marks(tmp_path)[0]["renewed"] > before["renewed"] + 1:
            break
        time.sleep(PERIOD / 2)
    assert marks(tmp_path)[0]["renewed"] > before["renewed"] + 1
    one.check()

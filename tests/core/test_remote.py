"""A model's folder in a store: the working copy, and whole jobs. A disk stands in for the store."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from m4.core import remote, run_folder
from m4.core.checkpoint import latest_step
from m4.core.report import read_metrics
from tests.command_line import TINY, m4


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "PERIOD_SECONDS", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run"


@pytest.fixture
def here(store: Path) -> Path:
    return remote.local(f"file://{store}")


def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    return remote.local(f"file://{store}")


def test_where_a_folder_is(store: Path, here: Path, tmp_path: Path) -> None:
    assert here.parent == tmp_path / "home" / "m4"
    assert here.name.startswith("run.")
    assert remote.local(f"file://{store}/") == here != remote.local(f"file://{store}2")
    assert str(remote.place(here / "checkpoints")) == f"{store}/checkpoints"
    assert str(remote.place(here / "compare" / "dense")) == f"{store}/compare/dense"
    assert remote.local("runs/demo") == Path("runs/demo")
    assert str(remote.place(tmp_path / "runs" / "demo")) == str(tmp_path / "runs" / "demo")


def test_the_store_has_what_the_copy_has_and_another_copy_gets_it(
    store: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_folder.locked(here):
        (here / "decodes").mkdir()
        (here / "decodes" / "a.jsonl").write_text("one\n", encoding="utf-8")
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        (here / ".unfinished.12").write_text("no", encoding="utf-8")
        remote.push(here / "checkpoints")
        assert (store / "metrics.jsonl").read_text(encoding="utf-8") == "1\n"
        assert json.loads((store / ".running.json").read_text(encoding="utf-8"))["pid"]
        with (here / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write("2\n")
        (here / "decodes" / "a.jsonl").unlink()
    names = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    assert names == {"metrics.jsonl"}, "neither what is hidden nor what is gone"
    other = another_machine(monkeypatch, tmp_path, store)
    remote.fetch(other)
    assert (other / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"
    with run_folder.locked(other):
        (other / "metrics.jsonl").unlink()
    remote.fetch(here)
    assert not (here / "metrics.jsonl").exists()


def test_it_follows_while_the_job_works(store: Path, here: Path) -> None:
    with run_folder.locked(here):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
        for _ in range(200):
            if (store / "metrics.jsonl").exists():
                break
            threading.Event().wait(0.05)
        assert (store / "metrics.jsonl").exists()


def test_a_reader_leaves_a_job_of_this_machine_alone(store: Path, here: Path) -> None:
    with run_folder.locked(here):
        metrics = (here / "metrics.jsonl").open("a", encoding="utf-8")
        metrics.write("1\n")
        metrics.flush()
        remote.push(here)
        (store / "metrics.jsonl").write_text("of another machine\n", encoding="utf-8")
        # As another process would: the lock, not what this one remembers, says that a job works.
        copy = remote._at_work.pop(here)
        remote.fetch(here)
        remote._at_work[here] = copy
        with metrics:
            metrics.write("2\n")
        assert (here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"


def test_what_a_killed_job_could_not_take_there_stays(store: Path, here: Path) -> None:
    with run_folder.locked(here):
        (here / "metrics.jsonl").write_text("1\n", encoding="utf-8")
    (here / "metrics.jsonl").write_text("1\n2\n", encoding="utf-8")
    with run_folder.locked(here):
        assert (here / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"
    assert (store / "metrics.jsonl").read_text(encoding="utf-8") == "1\n2\n"


def test_one_job_at_a_time_over_all_machines(
    store: Path,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store.mkdir(parents=True)
    running = store / ".running.json"
    # One that died says nothing more: after three periods its place is taken.
    running.write_text(json.dumps({"host": "gone", "pid": 1, "time": 0.0}), encoding="utf-8")
    with run_folder.locked(here):
        assert json.loads(running.read_text(encoding="utf-8"))["host"] != "gone"
    assert "gone was at work there; waiting" in capfd.readouterr().err
    assert not running.exists()
    # One that lives goes on saying so.
    ended = threading.Event()

    def alive() -> None:
        time = 0
        while not ended.wait(0.01):
            time += 1
            part = store.parent / "part"
            part.write_text(json.dumps({"host": "alive", "pid": 7, "time": time}), encoding="utf-8")
            part.replace(running)

    thread = threading.Thread(target=alive)
    thread.start()
    try:
        while not running.exists():
            ended.wait(0.01)
        with pytest.raises(ValueError, match=r"another m4 job is at work there \(alive, process 7"):
            run_folder.locked(here).__enter__()
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_a_model_in_a_store(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on one machine, longer on another one, scored there, read on a third."""
    address = f"file://{store}"
    said = m4("train", f"--gin_file={TINY}", f"--model_dir={address}", "--gin.TRAIN_STEPS=2")
    assert said.status == 0, said.err
    last = latest_step(store / "checkpoints")
    assert last == 2
    there = {path.name for path in store.iterdir()}
    assert {"checkpoints", "config.gin", "data", "metrics.jsonl", "run.json"} <= there
    assert ".running.json" not in there
    folder = another_machine(monkeypatch, tmp_path, store)
    said = m4("train", f"--model_dir={address}", "--gin.TRAIN_STEPS=3")
    assert said.status == 0, said.err
    assert "pairs" not in said.out, "the corpus is there"
    assert latest_step(store / "checkpoints") == latest_step(folder / "checkpoints") == 3
    steps = [row["step"] for row in read_metrics(store) if "loss" in row]
    assert steps == sorted(steps)
    assert steps[-1] == 3
    assert not (folder / "checkpoints").exists(), "they are in the store alone"
    said = m4("train", f"--model_dir={address}", "--gin.optimizer.rsqrt.peak=0.5")
    assert "belongs to another config" in said.mistake
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    said = m4("translate", f"--model_dir={address}", "--to=en", "a")
    assert said.status == 0, said.err
    assert len(said.out.splitlines()) == 1
    said = m4("train", f"--model_dir={address}", "--fresh", "--gin.TRAIN_STEPS=1")
    assert said.status == 0, said.err
    assert latest_step(store / "checkpoints") == 1

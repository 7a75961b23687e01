"""Whole jobs of a run whose folder is in a store. A disk stands in for the store."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from m4.jobs.decoding.evaluate import system
from m4.storage import remote
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from tests.command_line import TINY, experiment_of, m4
from tests.storage.disk_store import another_machine, files, marks, take_over


def taken_over_in_training(store: Path) -> None:
    """Once training has resumed: the latest checkpoint is then the other job's."""
    before = latest_step(store / "checkpoints")
    until = time.monotonic() + 120
    while latest_step(store / "checkpoints") == before and time.monotonic() < until:
        time.sleep(0.05)
    take_over(store)
    time.sleep(1)  # what was being saved is
    left = sorted(path.name for path in (store / "checkpoints").iterdir())
    (store.parent / "left.json").write_text(json.dumps(left), encoding="utf-8")


def test_scores_name_the_config_in_the_store(store: Path) -> None:
    """Not the working copy's, which is on one machine."""
    experiment = experiment_of(TINY, f"MODEL_DIR = 'file://{store}'")
    decodes = remote.local(f"file://{store}") / "decodes"
    scored = system(experiment, "moe", decodes, {"en-gl": 4})
    assert scored.config == {"en-gl": f"{store}/operative_config.gin"}


@pytest.mark.slow
@pytest.mark.thorough
def test_data_jobs_of_a_run_in_a_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look on another machine: the corpus is made once, what they write comes together."""
    address = f"--model_dir=file://{store}"
    preview = ("preview", "--temperatures=", f"--gin_file={TINY}")
    for number, look in enumerate([preview, ("vocabulary",), ("cleaning_report",)]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{number}"))
        result = m4("data", *look, address)
        assert result.status == 0, result.err
        assert ("training pairs in 3 languages" in result.out) == (number == 0)
        assert not marks(store)
    names = files(store)
    wanted = {"data_preview.json", "data_preview.html", "vocabulary_report.json"}
    wanted |= {"data_report.json", "data/manifest.json", "run.json", "config.gin"}
    assert wanted <= names.keys()
    here = remote.local(f"file://{store}")
    for name in [name for name in names if not name.startswith("data/")]:
        assert (here / name).read_bytes() == names[name]


@pytest.mark.slow
@pytest.mark.thorough
def test_run_in_a_store(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on one machine, longer on another one, scored there, read on a third."""
    address = f"file://{store}"
    trace = "--gin.experiment.Training.profile=(2, 2)"
    result = m4(
        "train", f"--gin_file={TINY}", f"--model_dir={address}", "--gin.TRAIN_STEPS=2", trace
    )
    assert result.status == 0, result.err
    last = latest_step(store / "checkpoints")
    assert last == 2
    there = {path.name for path in store.iterdir()}
    assert {"checkpoints", "config.gin", "data", "metrics.jsonl", "run.json"} <= there
    assert "heartbeat.json" in there
    assert len([*(store / "profile").glob("**/*.xplane.pb")]) == 1
    assert {"mfu", "goodput", "step_seconds"} <= read_metrics(store)[-2].keys()
    assert not marks(store)
    folder = another_machine(monkeypatch, tmp_path, store)
    result = m4("train", f"--model_dir={address}", "--gin.TRAIN_STEPS=3")
    assert result.status == 0, result.err
    assert "pairs" not in result.out, "the corpus is there"
    assert latest_step(store / "checkpoints") == latest_step(folder / "checkpoints") == 3
    steps = [row["step"] for row in read_metrics(store) if "loss" in row]
    assert steps == sorted(steps)
    assert steps[-1] == 3
    assert not (folder / "checkpoints").exists(), "they are in the store alone"
    result = m4("train", f"--model_dir={address}", "--gin.schedules.rsqrt.peak=0.5")
    assert "is trained with another config" in result.mistake
    # Taken over by another machine: nothing that it saved since is changed.
    thread = threading.Thread(target=taken_over_in_training, args=(store,))
    thread.start()
    result = m4("train", f"--model_dir={address}", "--gin.TRAIN_STEPS=100000")
    thread.join()
    assert result.status == 3, result.err
    assert "m4 train: MODEL_DIR = " in result.err.splitlines()[-1]
    assert "another job has taken it over (elsewhere, process 7)" in result.err.splitlines()[-1]
    left = json.loads((store.parent / "left.json").read_text(encoding="utf-8"))
    assert sorted(path.name for path in (store / "checkpoints").iterdir()) == left
    marks(store)[0].unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    result = m4("translate", f"--model_dir={address}", "--to=en", "a")
    assert result.status == 0, result.err
    assert len(result.out.splitlines()) == 1
    result = m4("train", f"--model_dir={address}", "--fresh", "--gin.TRAIN_STEPS=1")
    assert result.status == 0, result.err
    assert latest_step(store / "checkpoints") == 1

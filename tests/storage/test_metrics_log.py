"""Metrics in a run's folder."""

import json
from pathlib import Path

import pytest

from m4.storage.metrics_log import Metrics, read_metrics
from tests.storage.conftest import Capture, Patch


def test_rows_are_json_with_null_for_nan(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.write(1, {"loss": 2.5, "bad": float("nan"), "worse": float("inf")})
        # Written at once: a killed job has written all its rows.
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5, "bad": None, "worse": None}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_rows_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": float(step)} for step in (2, 4, 4, 6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 8, "lo')  # killed in this line
    with Metrics(tmp_path, resume_step=4, tensorboard=False) as metrics:
        metrics.write(6, {"loss": 0.0})
    assert read_metrics(tmp_path) == [*rows[:3], {"step": 6, "loss": 0.0}]


def test_tensorboard_has_t5xs_tags_where_they_mean_the_same(tmp_path: Path) -> None:
    row = {"router_confidence": 0.5, "expert_usage": float("nan"), "step_seconds": 0.25}
    with Metrics(tmp_path) as metrics:
        metrics.write(1, row)
    (events,) = (tmp_path / "tensorboard").iterdir()
    written = events.read_bytes()
    for tag in (b"experts/router_confidence", b"timing/steps_per_second", b"step_seconds"):
        assert tag in written
    # What is no number has no tag of T5X's; metrics.jsonl has m4's names alone.
    assert b"experts/expert_usage" not in written
    assert read_metrics(tmp_path)[0].keys() == {"step", *row}


def test_without_a_folder_metrics_write_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    with Metrics(None, resume_step=3) as metrics:
        metrics.write(4, {"nll": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2: damaged \(not JSON"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("damage", ["", '{"step": 2, "loss": 2.5}\n', None])
def test_lost_or_changed_rows_are_one_line(
    damage: str | None, tmp_path: Path, capfd: Capture
) -> None:
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.write(2, {"loss": 2.0})
        saved = {**metrics.note(), "step": 2}
        metrics.write(4, {"loss": 1.0})
    resumed = {"resume_step": 2, "saved": saved, "tensorboard": False}
    with Metrics(tmp_path, **resumed) as metrics:  # as it was written
        assert metrics.note() == {"metrics": saved["metrics"]}
    assert not capfd.readouterr().err
    path = tmp_path / "metrics.jsonl"
    path.unlink() if damage is None else path.write_text(damage)
    with Metrics(tmp_path, **resumed):
        pass
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{path}: its rows up to step 2 are not those that training wrote")

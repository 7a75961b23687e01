"""`m4 watch`: what a run's files say, in lines."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from m4.jobs import watch
from m4.jobs.watch import look_at
from m4.storage.files import write_jsonl
from tests.command_line import m4

ROW = {"nll": 1.5, "nll/high": 1.25, "nll/low": 2.0, "tokens_per_second": 1234.4, "mfu": 0.31,
       "goodput": 0.9, "step_seconds": 2.0, "expert_usage": 0.55, "dead_experts": 0.0}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {"experiment.Training.total_steps": "100"}
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    return tmp_path


def write(folder: Path, steps: int, phase: str = "step", age: float = 3.0) -> None:
    rows = [{"step": step, **ROW} for step in range(10, steps + 1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    beat = {"step": steps + 2, "phase": phase, "time": time.time() - age, "started": 0.0}
    (folder / "heartbeat.json").write_text(json.dumps(beat))


def said(folder: Path) -> dict[str, Any]:
    return look_at(folder, time.time()).lines


def test_a_running_job(run: Path) -> None:
    write(run, 30)
    (run / "checkpoints" / "20").mkdir(parents=True)
    scores = [("moe", "en-gl", 20.0), ("moe", "gl-en", 30.0), ("bilingual", "gl-en", 10.0)]
    same = {"subset": "all", "metric": "bleu", "low": 0.0, "high": 99.0, "sentences": 9}
    rows = [{"system": s, "direction": d, "score": x, "signature": ""} for s, d, x in scores]
    write_jsonl(run / "scores.jsonl", [{**same, **row} for row in rows])
    now = said(run)
    # The heartbeat is at step 32: 68 steps of 2 s are left.
    assert now["step"] == "32 of 100 · 2 s a step · 2 min of steps left"
    assert now["job"] == "running: step (3 s ago)"
    assert now["loss"] == "nll 1.500 · high 1.250 · low 2.000"
    assert now["speed"] == "tokens/s 1,234 · MFU 31.0% · goodput 90.0%"
    assert now["experts"] == "slots used 55% · dead 0 a layer"
    assert now["checkpoint"] == "step 20"
    assert now["scores"] == "moe bleu 25.0 · bilingual bleu 10.0"


def test_a_silent_job_and_one_that_has_ended(run: Path) -> None:
    assert "no heartbeat" in said(run)["job"]
    write(run, 30, age=600.0)
    assert said(run)["job"] == "NO SIGN OF LIFE for 10 min (phase step)"
    write(run, 98, phase="end", age=7300.0)
    assert said(run)["job"] == "ended 2 h 1 min ago"
    write(run, 30, phase="interrupted", age=7300.0)
    assert said(run)["job"] == "interrupted 2 h 1 min ago"
    assert said(run)["step"] == "32 of 100 · 2 s a step · 2 min of steps left"


def test_after_an_early_stop_no_steps_are_left(run: Path) -> None:
    write(run, 30, phase="end", age=7300.0)
    assert said(run)["job"] == "stopped early, ended 2 h 1 min ago"
    assert said(run)["step"] == "32 of 100"


def test_a_line_whenever_something_changed_until_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, 10)
    later = iter([lambda: None, lambda: write(run, 20), lambda: write(run, 30, phase="end")])
    monkeypatch.setattr(watch, "_sleep", lambda _: next(later)())
    out = io.StringIO()
    watch.watch(str(run), stream=out)
    steps = [line.split(" of ")[0] for line in out.getvalue().splitlines()]
    assert steps == ["step: 12", "step: 22", "step: 32"]


def test_mistakes_are_one_line(run: Path) -> None:
    assert "not a run's folder" in m4("watch", f"--model_dir={run / 'none'}").mistake
    assert "--seconds=0.0" in m4("watch", run, "--seconds=0").mistake
    (run / "scores_by_step.jsonl").write_text('{"system": "moe", "split": "dev", "step": 1}\n')
    assert "scores_by_step.jsonl line 1: " in m4("watch", run, "--once").mistake

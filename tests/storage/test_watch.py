"""`m4 watch` of a run in a bucket (`tests.bucket`)."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from m4.jobs import watch
from tests.bucket import BUCKET, Emulator


def test_a_run_is_watched_from_its_bucket(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look sees what the training machine has uploaded since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def upload(step: int, phase: str) -> None:
        beat = {"step": step, "phase": phase, "time": time.time(), "started": 0.0}
        score = {"split": "dev", "step": step, "metric": "bleu", "level": "all", "score": step}
        for name, row in (
            ("run.json", {"config": {"experiment.Training.total_steps": "6"}}),
            ("metrics.jsonl", {"step": step, "nll": 10 - step}),
            ("heartbeat.json", beat),
            ("scores_by_step.jsonl", {**score, "best": True}),
            (f"checkpoints/{step}/commit_success.txt", {}),
        ):
            emulator.write(f"runs/watched/{name}", json.dumps(row).encode() + b"\n")

    upload(2, "step")
    later = iter([lambda: None, lambda: upload(4, "step"), lambda: upload(6, "end")])
    monkeypatch.setattr(watch, "_sleep", lambda _: next(later)())
    out = io.StringIO()
    watch.watch(f"gs://{BUCKET}/runs/watched", stream=out)
    two, four, six = out.getvalue().splitlines()
    assert two.startswith("step: 2 of 6 | job: running: step (")
    assert "loss: nll 6.000 | checkpoint: step 4 | by step: step 4 dev: BLEU 4.0 (the best)" in four
    assert six.startswith("step: 6 of 6 | job: ended ")
    assert ".running" not in {name.split("/")[0] for name in emulator.names("runs/watched")}

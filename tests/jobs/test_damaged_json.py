"""Damaged JSON is one line that names the file, whoever reads it: no traceback."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from m4.eval.scoring import rates, score
from m4.jobs.bilingual import Baseline
from m4.settings import InputError
from m4.storage import run_folder, steps
from m4.storage.files import read_json, write_json, write_text
from m4.storage.local_copy import LocalCopy
from m4.storage.metrics_log import read_metrics
from m4.train.measuring import routing_counts, watchdog
from tests.command_line import TINY, experiment_of
from tests.damage import damaged_json, refused
from tests.storage.conftest import config_of

METRICS = '{"step": 2, "nll": 3.5}'
HEARTBEAT = '{"step": 3, "phase": "train", "time": 1.5, "started": 0.5}'
MANIFEST = '{"files": {"params/_METADATA": [3, "abc"]}}'
DECODE = '{"source": "a", "reference": "b", "hypothesis": ""}'
SCORE = (
    '{"system": "moe", "direction": "en-gl", "subset": "all", "metric": "bleu", "score": 1.5, '
    '"low": 1, "high": 2, "signature": "a|b", "sentences": 3, "train_pairs": 60}'
)
BY_STEP = (
    '{"split": "dev", "step": 2, "metric": "bleu", "level": "all", "score": 1.5, "best": true}'
)
RATES = (
    '{"system": "moe", "direction": "en-gl", "of": "1a", "sentences": 3, "loops": 0.5, '
    '"off_language": null, "taken_for": {"pt": 0.5}}'
)
RESULT = '{"note": {"best_step": 4, "step": 4}, "stopped_early": true, "gain_last_quarter": 0.5}'


def readers(folder: Path) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Returns file -> (content that m4 writes there, function that reads it)."""
    run_folder.claim(folder, **config_of({"TRAIN_STEPS": "10"}))
    counts = routing_counts.Counts(["en-gl"])
    counts.add({"encoder_0": [[3, 4]]})
    routing_counts.write(folder / "atlas.train.json", counts, {"steps": 4})
    (folder / "sha256").mkdir()
    copy = LocalCopy("gs://bucket/run")
    copy.here = folder
    plan = Baseline("gl", experiment_of(TINY, f"MODEL_DIR = {str(folder)!r}"), {})
    return {
        "run.json": ((folder / "run.json").read_text(), lambda: run_folder.read(folder)),
        "atlas.train.json": (
            (folder / "atlas.train.json").read_text(),
            lambda: routing_counts.read(folder / "atlas.train.json"),
        ),
        "metrics.jsonl": (METRICS, lambda: read_metrics(folder)),
        "heartbeat.json": (HEARTBEAT, lambda: watchdog.heartbeat(folder)),
        "sha256/manifest.json": (MANIFEST, lambda: steps.files_of(epath.Path(folder))),
        ".bucket.json": ('{"scores.jsonl": [9, "1", "1"]}', copy._read_record),
        "result.json": (RESULT, lambda: plan.result),
        "scores.jsonl": (SCORE, lambda: score.read_scores(folder / "scores.jsonl")),
        "by_step.jsonl": (BY_STEP, lambda: score.read_by_step(folder / "by_step.jsonl")),
        "rates.jsonl": (RATES, lambda: rates.read_rates(folder / "rates.jsonl")),
        "test.jsonl": (DECODE, lambda: score.read_decodes(folder / "test.jsonl")),
    }


def test_whatever_is_damaged_in_a_run(tmp_path: Path) -> None:
    for name, (text, read) in readers(tmp_path).items():
        times = 0
        for damaged in damaged_json(text):
            (tmp_path / name).write_bytes(damaged + b"\n")
            times += refused(read, name)
        write_text(tmp_path / name, text + "\n")
        assert not refused(read, name)
        assert times >= 10, name


def test_another_value_in_a_file_with_a_checksum_is_named(tmp_path: Path) -> None:
    """Translations, a baseline's result and experts' choices are valid JSON, but not as written."""
    path = tmp_path / "result.json"
    write_json(path, {"step": 4, "rate": math.nan, "by_id": {10: "ü", 9: (1, 2)}})
    assert read_json(path)["by_id"] == {"10": "ü", "9": [1, 2]}
    assert "checksum" not in read_json(path)
    write_text(path, path.read_text("utf-8").replace('"step": 4', '"step": 5'))
    with pytest.raises(InputError, match=r"result.json: damaged \(its content is not what was"):
        read_json(path)

"""The metrics of a source's own tasks, next to the scores."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m4.eval.decoding.testsets import Portion
from m4.eval.scoring.score import System
from m4.jobs.decoding.evaluate import _task_metrics
from m4.storage.files import read_jsonl, write_jsonl


def test_metrics_are_of_the_sentences_that_were_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"text {number}" for number in range(12)]
    chosen = Portion("test", test_sentences=3).chosen(range(12))
    rows = [{"source": "a", "reference": "b", "hypothesis": texts[n]} for n in chosen]
    write_jsonl(tmp_path / "test.en-gl.jsonl", rows)

    def task_metrics(direction: str, split: str, sentences: int, predictions: Any) -> Any:
        assert (direction, split) == ("en-gl", "test")
        if sentences != known:
            return None
        return {"right": sum(texts[n] == text for n, text in predictions.items())}

    source = SimpleNamespace(task_metrics=task_metrics)
    corpus = SimpleNamespace(opened_source=source)
    experiment: Any = SimpleNamespace(data=SimpleNamespace(corpus=corpus))
    cache: Any = SimpleNamespace(directions=["en-gl"], size=lambda language, split: 12)
    system = System("moe", tmp_path, checkpoint_step=7)
    given = (
        experiment,
        cache,
        system,
        Portion("test", test_sentences=3),
        tmp_path / "scores.jsonl",
    )
    known = 12
    assert _task_metrics(*given) == [path := tmp_path / "task_metrics.jsonl"]
    of = {"direction": "en-gl", "split": "test", "checkpoint_step": 7}
    assert read_jsonl(path) == [{**of, "right": 3}]
    # Without a row there is no file, also no older one, and none is announced.
    known = 13
    assert _task_metrics(*given) == []
    assert not path.exists()
    assert "no task_metrics.jsonl: cleaning left out examples" in capsys.readouterr().out

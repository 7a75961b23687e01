"""`benchmarks/batch_invariance.py`: no token of a trained run depends on its batch or devices."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from m4 import config
from m4.eval.decoding.decode import TrainedModel
from m4.eval.decoding.testsets import Portion
from tests.eval.small_model import MOE, SETTINGS, Words, sentences, tiny
from tests.test_examples import FOLDER, example

job = example("batch_invariance", FOLDER.with_name("benchmarks"))
# One length of sources, and so one program a number of rows.
SHORT = "experiment.Decoding.max_source_length = 16"


def check(run: Path, sentences: int, *directions: str) -> int:
    found = config.load([run / "config.gin"], [SHORT], model_dir=run)
    return job.check(found.experiment(), Portion("test", sentences, directions))


def test_no_token_changes_by_batch_order_or_mesh(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(trained, 3, "en-es", "gl-en") == 0
    said = capsys.readouterr().out
    assert "0 of " in said
    assert "en-es" in said
    assert "gl-en" in said


def test_changed_tokens_are_counted(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(model: TrainedModel, texts: Any, *more: Any):
        return [[7, 8, 8, 1] if model.decoding.batch_rows == 8 else [7, 9, 1] for _ in texts]

    monkeypatch.setattr(job, "translated", found)
    # In 7 9 1 -> 7 8 8 1, two tokens differ and one is new, on one device and over the mesh.
    assert check(trained, 1, "en-gl") == 6


def test_a_model_that_drops_tokens_depends_on_its_batch() -> None:
    """The planted fault: experts with too few slots for the tokens of a batch of beams."""
    model, params = tiny(moe=partial(MOE, decode_capacity_factor=0.5))
    texts = sentences(11, seed=1)
    one, *others = (
        job.translated(
            TrainedModel(model, params, Words(), replace(SETTINGS, batch_rows=rows)), texts, mix
        )
        for rows, mix in ((1, False), (8, False), (8, True))
    )
    assert max(sum(map(job.changed, one, each)) for each in others) > 0

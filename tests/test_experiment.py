"""The corpus of an experiment: opened, made, made anew, refused."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from m4 import jobs
from m4.data.cache import cache
from m4.data.cache.cache import Cache
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.experiment import Setup, corpus
from tests.data.corpus import Made


def prepared(folder: Path, pairs: int = 40, vocabulary_size: int = 400) -> Cache:
    source = Made({"gl": pairs})
    made = functools.partial(cache.prepare, source=source, vocabulary_size=vocabulary_size)
    return corpus(Setup(str(folder), total_steps=1, corpus=made))


def test_a_corpus_is_made_anew_until_something_is_trained_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepared(tmp_path)
    assert first.replaced is None
    assert "made anew" not in capsys.readouterr().out
    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert prepared(tmp_path).fingerprint == first.fingerprint
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before  # only opened
    assert capsys.readouterr() == ("", "")
    other = prepared(tmp_path, pairs=41)
    assert other.fingerprint != first.fingerprint
    assert f"made anew: {tmp_path}/data: this cache was made with" in capsys.readouterr().out
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="vocabulary_size = 400, now 380"):
        prepared(tmp_path, pairs=41, vocabulary_size=380)
    assert Cache(tmp_path / "data").fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"total_steps": -3},
            r"total_steps = -3: must be a whole number from 0 on \(TRAIN",
        ),
        ({"total_steps": 1e4}, r"total_steps = 10000\.0: must be a whole number"),
        ({"batch_size": 0}, r"batch_size = 0: must be a whole number from 1 on \(BATCH_SIZE\)"),
        ({"batch_size": "x"}, "batch_size = 'x': must be a whole number"),
        ({"dev_period": 0}, "dev_period = 0: must be a whole number from 1 on"),
        ({"seed": "a"}, "seed = 'a': must be a whole number from 0 on"),
        (
            {"lengths": {"inputs": 64}},
            r"lengths = {'inputs': 64}: must be {'inputs'",
        ),
        (
            {"lengths": {"inputs": 64, "targets": 2}},
            r"lengths\['targets'\] = 2: must be a",
        ),
    ],
)
def test_numbers_that_cannot_be_are_told_before_anything_is_made(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=rf"jobs\.Setup\.{said}"):
        Setup(str(tmp_path), **({"total_steps": 1, "corpus": cache.prepare} | wrong))


def test_a_sampler_that_never_learns_is_told_before_anything_is_made(tmp_path: Path) -> None:
    def made(**_: Any) -> Cache:
        raise AssertionError("the corpus is made")

    setup = Setup(str(tmp_path), total_steps=4, dev_period=4, corpus=made, sampler=Learned())
    with pytest.raises(ValueError) as error:
        jobs.train(setup)
    assert str(error.value) == (
        "jobs.Setup.sampler = @learned.Learned() never learns: jobs.Setup.dev_period = 4 must be "
        "less than TRAIN_STEPS = 4"
    )
    # One evaluation within the training is enough; and who does not learn needs none.
    for other in ({"dev_period": 3}, {"sampler": uniform}):
        with pytest.raises(AssertionError, match="the corpus is made"):
            jobs.train(dataclasses.replace(setup, **other))

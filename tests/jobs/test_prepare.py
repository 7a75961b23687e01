"""The corpus of an experiment: opened, built, rebuilt, refused; sizes checked before it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.experiment import Data, Experiment, Training
from m4.jobs import prepare
from m4.settings import SettingError
from m4.train.optimizer import adamw
from tests.data.corpus import Made


def experiment(folder: Path, pairs: int = 40, vocabulary_size: int = 400) -> Experiment:
    spec = CorpusSpec(source=Made({"gl": pairs}), vocabulary_size=vocabulary_size)
    return Experiment(str(folder), Data(spec), Training(8, 8, adamw))


def test_a_corpus_is_rebuilt_until_something_is_trained_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(**changes: Any) -> Cache:
        return prepare.open_corpus(experiment(tmp_path, **changes))

    first = opened()
    assert first.replaced is None
    assert "rebuilt" not in capsys.readouterr().out
    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    assert opened().fingerprint == first.fingerprint
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before  # only opened
    assert capsys.readouterr() == ("", "")
    other = opened(pairs=41)
    assert other.fingerprint != first.fingerprint
    assert f"rebuilt: {tmp_path}/data: this cache was made with" in capsys.readouterr().out
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="vocabulary_size = 400, now 380"):
        opened(pairs=41, vocabulary_size=380)
    assert Cache(tmp_path / "data").fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"batch_size": 12}, "Training.batch_size"),  # 8 devices
        ({"batch_size": 8, "grad_accum_steps": 3}, "Training.grad_accum_steps"),
    ],
)
def test_sizes_are_checked_before_the_corpus(
    tmp_path: Path, change: dict[str, Any], setting: str
) -> None:
    one = experiment(tmp_path)
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, **change))
    with pytest.raises(ValueError, match=setting):
        prepare.check_sizes(one)
    assert not (tmp_path / "data").exists()


def test_a_sampler_that_never_learns_is_refused(tmp_path: Path) -> None:
    def checked(sampler: Any, dev_period: int) -> None:
        one = experiment(tmp_path)
        training = dataclasses.replace(one.training, dev_period=dev_period)
        data = dataclasses.replace(one.data, sampler=sampler)
        prepare.check_sizes(dataclasses.replace(one, data=data, training=training))

    with pytest.raises(SettingError, match=r"Training.dev_period = 8: must be less than .* = 8"):
        checked(Learned(), 8)
    # One evaluation within the training is enough; a sampler that does not learn needs none.
    checked(Learned(), 7)
    checked(uniform, 8)

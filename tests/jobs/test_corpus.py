"""A corpus apart from the run: built once, and found again."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m4
from m4 import config
from m4.data.corpus import CorpusSpec
from m4.experiment import Data, Experiment, Training
from m4.jobs import corpus
from m4.jobs.corpus import open_corpus
from m4.settings import SettingError
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.train.optimizer import adamw
from tests.command_line import TINY, contents
from tests.command_line import m4 as command
from tests.data.corpus import Made


def experiment(
    folder: Path, data_dir: str | Path | None, pairs: int = 40, **settings: Any
) -> Experiment:
    """data_dir: None: in the run's folder."""
    spec = CorpusSpec(source=Made({"gl": pairs}), vocabulary_size=400, **settings)
    shared = None if data_dir is None else str(data_dir)
    return Experiment(str(folder), Data(spec, data_dir=shared), Training(8, 8, adamw))


def test_two_runs_share_one_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = open_corpus(experiment(tmp_path / "a", tmp_path / "shared"))
    assert "40 training pairs" in capsys.readouterr().out
    before = contents(tmp_path / "shared")
    second = open_corpus(experiment(tmp_path / "b", f"{tmp_path}/shared/"))
    assert capsys.readouterr() == ("", "")
    assert first.folder == second.folder == tmp_path / "shared" / first.fingerprint
    assert contents(tmp_path / "shared") == before
    assert not (tmp_path / "a").exists()
    # What m4.prepare_corpus builds is the same.
    other = m4.prepare_corpus(tmp_path / "other", Made({"gl": 40}), vocabulary_size=400)
    assert other.cache.fingerprint == first.fingerprint
    again = m4.prepare_corpus(tmp_path / "shared", Made({"gl": 40}), vocabulary_size=400)
    assert again.languages == ["en", "gl"]


def test_runs_of_different_corpora_share_a_folder(tmp_path: Path) -> None:
    one, more = (experiment(tmp_path / "run", tmp_path / "shared", pairs) for pairs in (40, 41))
    first, second = open_corpus(one), open_corpus(more)
    assert {*(tmp_path / "shared").iterdir()} == {first.folder, second.folder}
    assert open_corpus(one).folder == first.folder != second.folder


def test_a_shared_corpus_is_not_in_a_runs_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"Data.data_dir = .* must be a folder outside"):
        experiment(tmp_path / "run", tmp_path / "run" / "corpus")


def test_a_model_keeps_its_vocabulary(tmp_path: Path) -> None:
    one = experiment(tmp_path / "run", tmp_path / "shared")
    cache = open_corpus(one)
    corpus.keep_vocabulary(one, cache)
    pieces = cache.vocabulary.encode("bird")
    shutil.rmtree(tmp_path / "shared")
    kept = corpus.open_vocabulary(one)
    assert kept.vocabulary.encode("bird") == pieces
    assert kept.directions == cache.directions
    # With a trained model there, another vocabulary does not take its place.
    save_step(tmp_path / "run" / "checkpoints")
    other = experiment(tmp_path / "run", tmp_path / "other", pairs=80)
    said = (
        r"run: the model there was trained with another corpus \(source.by_pair.en-gl = 40, now 80"
    )
    with pytest.raises(ValueError, match=said):
        corpus.keep_vocabulary(other, open_corpus(other))
    assert corpus.open_vocabulary(one).fingerprint == kept.fingerprint


def save_step(folder: Path) -> None:
    with contextlib.closing(Checkpoints(folder)) as saved:
        saved.save(1, {"params": {"a": np.zeros(1)}}, {"step": 1})


def test_a_saved_config_writes_no_corpus(tmp_path: Path) -> None:
    saved = tmp_path / "config.gin"
    line = f"experiment.Data.data_dir = '{tmp_path}/there'\n"
    saved.write_text(TINY.read_text(encoding="utf-8") + line, encoding="utf-8")
    model = [f"MODEL_DIR = '{tmp_path}/run'"]
    made = config.load([saved], model, allowed_modules=())
    with pytest.raises(ValueError, match="a saved config names no folder to write to"):
        open_corpus(made.experiment())
    assert not (tmp_path / "there").exists()
    assert "experiment.Data.data_dir" in made.mutable
    given = config.load([saved], [*model, line.strip()], allowed_modules=())
    open_corpus(given.experiment())
    assert open_corpus(made.experiment()).language_pairs() == ["en-es", "en-pt", "en-gl"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_whose_corpus_moved_resumes_and_fresh_keeps_it(tmp_path: Path) -> None:
    def trained(run: str, data_dir: str, steps: int, *more: str) -> None:
        command(
            *("train", f"--gin_file={TINY}", f"--model_dir={tmp_path / run}", *more),
            *("--gin.experiment.Training.log_period=1", f"--gin.TRAIN_STEPS={steps}"),
            f"--gin.experiment.Data.data_dir='{tmp_path / data_dir}'",
        ).ok()

    def losses(run: str) -> list[float]:
        return [row["loss"] for row in read_metrics(tmp_path / run) if "loss" in row]

    trained("straight", "before", 4)
    trained("moved", "before", 2)
    (tmp_path / "before").rename(tmp_path / "after")
    trained("moved", "after", 4)
    assert losses("moved") == losses("straight")
    kept = [*(tmp_path / "after").iterdir()]
    trained("straight", "after", 1, "--fresh")
    assert [*(tmp_path / "after").iterdir()] == kept
    assert not (tmp_path / "straight" / "data").exists()
    # A trained model needs no corpus to translate.
    shutil.rmtree(tmp_path / "after")
    assert len(m4.load(tmp_path / "moved").translate(["3 weeks ago"], to="gl")) == 1

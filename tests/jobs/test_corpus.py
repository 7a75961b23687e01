"""The corpus of an experiment: apart from the run, built once, found again; checked before."""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import m4
from m4 import config
from m4.build import build
from m4.data.corpus import CorpusSpec
from m4.data.samplers.learned import Learned
from m4.data.samplers.uniform import uniform
from m4.experiment import Data, Experiment, Training
from m4.jobs import corpus
from m4.jobs.corpus import open_corpus
from m4.jobs.train import check_and_train
from m4.model.gates.by_direction import by_direction
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.settings import SettingError
from m4.storage.checkpoints import Checkpoints
from m4.train.multitask.groups import by_family
from m4.train.optimizer import adamw
from tests.command_line import TINY, contents
from tests.command_line import m4 as command
from tests.data.corpus import Made


def experiment(
    folder: Path, data_dir: str | Path | None = None, pairs: int = 40, **settings: Any
) -> Experiment:
    """Returns an experiment on made-up text; by default the corpus is in the run's folder."""
    spec = CorpusSpec(source=Made({"gl": pairs}), vocabulary_size=400, **settings)
    shared = None if data_dir is None else str(data_dir)
    model = functools.partial(Transformer, width=16, encoder_layers=1, decoder_layers=1)
    return Experiment(str(folder), Data(spec, data_dir=shared), Training(8, 8, adamw), model)


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
    assert again.cache.languages() == ["en", "gl"]


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
    with Checkpoints(folder) as saved:
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


def test_corpora_are_listed_with_their_runs_and_removed_without(tmp_path: Path) -> None:
    one, other = (experiment(tmp_path / "run", tmp_path / "data", pairs) for pairs in (40, 41))
    used, left = open_corpus(one), open_corpus(other)
    corpus.keep_vocabulary(one, used)
    runs = ("--runs", tmp_path / "run", tmp_path / "nothing")
    said = command("data", "list", tmp_path / "data", *runs)
    head, *rows = [line.split("\t") for line in said.out.splitlines()]
    assert head[:3] == ["corpus", "languages", "pairs"]
    found = {row[0]: row for row in rows}
    assert {*found} == {str(used.folder), str(left.folder)}
    assert found[str(used.folder)][1:3] == ["2", "40"]
    assert [found[str(of.folder)][-1] for of in (used, left)] == [str(tmp_path / "run"), ""]
    both = ("data", "remove", left.folder, used.folder)
    assert f"{used.folder}: {tmp_path}/run was trained with it" in command(*both, *runs).mistake
    assert "not a corpus" in command("data", "remove", tmp_path / "run").mistake
    assert left.folder.is_dir()
    assert command("data", "remove", left.folder, *runs).out == f"removed {left.folder}\n"
    assert [*(tmp_path / "data").iterdir()] == [used.folder]
    said = command("data", "list", tmp_path / "elsewhere")
    assert (said.out, "no such folder" in said.mistake) == ("", True)


def test_sizes_are_checked_before_the_corpus(tmp_path: Path) -> None:
    """Here an axis that only a parameter has; others: tests/train/test_trainer.py."""
    one = experiment(tmp_path)
    mesh = functools.partial(make_mesh, devices=jax.devices()[:6])
    change = {"batch_size": 12, "mesh": mesh, "extra_axis_rules": [("relpos_buckets", "data")]}
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, **change))
    with pytest.raises(ValueError, match="relpos_buckets = 32 must be divisible by 6"):
        check_and_train(one)
    assert not (tmp_path / "data").exists()


def test_tasks_are_of_the_languages_that_the_source_has(tmp_path: Path) -> None:
    """Two languages are two families here, although CorpusSpec.languages names none."""
    one = experiment(tmp_path)
    data = Data(dataclasses.replace(one.data.corpus, source=Made({"gl": 40, "sr_Latn": 40})))
    layer = functools.partial(MoeLayer, num_experts=2, gate=by_direction)
    model = functools.partial(one.model, moe=layer, moe_every=1)
    one = dataclasses.replace(one, data=data, model=model, tasks=by_family)
    assert sorted(set(build(one, None).model.tasks)) == [0, 1]


def test_a_sampler_that_never_learns_is_refused(tmp_path: Path) -> None:
    def checked(sampler: Any, dev_period: int) -> None:
        one = experiment(tmp_path)
        training = dataclasses.replace(one.training, dev_period=dev_period)
        data = dataclasses.replace(one.data, sampler=sampler)
        build(dataclasses.replace(one, data=data, training=training), None).check_training()

    with pytest.raises(SettingError, match=r"Training.dev_period = 8: must be less than .* = 8"):
        checked(Learned(), 8)
    # One evaluation within the training is enough; a sampler that does not learn needs none.
    checked(Learned(), 7)
    checked(uniform, 8)

"""A corpus apart from the run: built once, locked, found again, downloaded in part."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import m4
from m4 import config
from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.experiment import Data, Experiment, Training
from m4.jobs import corpus
from m4.jobs.corpus import open_corpus
from m4.settings import SettingError
from m4.storage import remote
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
    assert first.folder == second.folder == tmp_path / "shared"
    assert contents(tmp_path / "shared") == before
    assert not (tmp_path / "a").exists()
    # What m4.prepare_corpus builds is the same.
    other = m4.prepare_corpus(tmp_path / "other", Made({"gl": 40}), vocabulary_size=400)
    assert other.cache.fingerprint == first.fingerprint
    again = m4.prepare_corpus(first.folder, Made({"gl": 40}), vocabulary_size=400)
    assert again.languages == ["gl"]


def test_another_corpus_there_is_named_and_stays(tmp_path: Path) -> None:
    one = experiment(tmp_path / "run", tmp_path / "shared")
    made = open_corpus(one)
    other = experiment(tmp_path / "run", tmp_path / "shared", pairs=41)
    said = (
        rf"data_dir = {tmp_path}/shared: this cache was made with .*gl = 40, now 41; give another "
        r"data_dir, or replace it for all its runs with m4 data prepare --rebuild$"
    )
    with pytest.raises(ValueError, match=said):
        open_corpus(other)
    assert open_corpus(one).fingerprint == made.fingerprint
    assert corpus.opened_or_built(other, rebuild=True).fingerprint != made.fingerprint
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "gl.train.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match="text: neither a cache nor empty; give another data_dir"):
        open_corpus(experiment(tmp_path / "run", tmp_path / "text"))


def test_text_that_has_changed_since_training_names_another_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one, more = (experiment(run, None, pairs) for pairs in (40, 41))
    made = open_corpus(one)
    (run / "checkpoints").mkdir()
    said = (
        rf"data_dir = {run}/data: this cache was made with .*gl = 40, now 41; choose "
        r"another MODEL_DIR, where --init_from continues from this one, or start over with --fresh$"
    )
    with pytest.raises(ValueError, match=said):
        open_corpus(more)
    assert open_corpus(one).fingerprint == made.fingerprint


def test_one_job_at_a_time_builds_and_the_second_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = experiment(tmp_path / "run", tmp_path / "shared")
    with ExitStack() as other:
        other.enter_context(remote.locked(tmp_path / "shared", "data_dir"))

        def built_meanwhile(_seconds: float) -> None:
            one.data.corpus.build(tmp_path / "shared")
            other.close()

        monkeypatch.setattr(corpus, "_sleep", built_meanwhile)
        open_corpus(one)
    said = capsys.readouterr()
    assert said.err == (
        f"data_dir = {tmp_path}/shared: another m4 job is at work there; waiting for its corpus\n"
    )
    assert "corpus" not in said.out, "it is built once"
    with remote.locked(tmp_path / "shared", "data_dir"):
        open_corpus(one)  # reading needs no lock


def test_a_shared_corpus_is_not_in_a_runs_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"Data.data_dir = .* must be a folder outside"):
        experiment(tmp_path / "run", tmp_path / "run" / "corpus")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process another machine, with separate working copies."""

    def become(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    return become


def test_a_machine_downloads_what_its_job_reads(tmp_path: Path, machine: Any) -> None:
    store = tmp_path / "store" / "corpus"
    one = experiment(tmp_path / "run", f"file://{store}")
    machine("builder")
    built = open_corpus(one)
    assert (store / "manifest.json").is_file()
    names = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}
    assert names >= {"text/train.gl.tsv", "train.english.tokens.npy", "data_report.html"}

    machine("trainer")
    cache = open_corpus(one, corpus.arrays)
    assert cache.fingerprint == built.fingerprint
    here = {path.name for path in cache.folder.rglob("*") if not path.name.startswith(".")}
    assert here >= {"train.english.tokens.npy", "dev.foreign.offsets.npy", "vocabulary.model"}
    assert not here & {"text", "data_report.html", "data_report.json", "ledger.json"}

    machine("decoder")
    cache = open_corpus(one, corpus.test_sets)
    assert len(list(cache.pairs("gl", "test"))) == 20
    assert cache.subsets("gl", "dev")
    assert not list(cache.folder.glob("*.npy"))
    assert not (cache.folder / "text" / "train.gl.tsv").exists()
    # The next job of that machine reads more.
    assert open_corpus(one, corpus.arrays).folder == cache.folder
    assert list(cache.folder.glob("train.*.npy"))


def test_a_runs_own_corpus_is_no_part_of_its_copy(tmp_path: Path, machine: Any) -> None:
    one = experiment(tmp_path, "x")
    one = dataclasses.replace(
        one, model_dir=f"file://{tmp_path}/run", data=dataclasses.replace(one.data, data_dir=None)
    )
    machine("first")
    open_corpus(one)
    assert (tmp_path / "run" / "data" / "manifest.json").is_file()
    machine("second")
    run = remote.local(one.model_dir)
    remote.fetch(run)
    assert not (run / "data").exists()
    assert open_corpus(one, corpus.arrays).folder != run / "data"


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
    (tmp_path / "run" / "checkpoints").mkdir()
    other = experiment(tmp_path / "run", tmp_path / "other", pairs=80)
    with pytest.raises(ValueError, match=r"data_dir = .*/other: its vocabulary is not the one"):
        corpus.keep_vocabulary(other, open_corpus(other))
    assert corpus.open_vocabulary(one).fingerprint == kept.fingerprint


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
    assert open_corpus(made.experiment()).languages() == ["es", "pt", "gl"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_whose_corpus_moved_resumes_and_fresh_keeps_it(tmp_path: Path) -> None:
    def trained(run: str, data_dir: str, steps: int, *more: str) -> None:
        said = command(
            *("train", f"--gin_file={TINY}", f"--model_dir={tmp_path / run}", *more),
            *("--gin.experiment.Training.log_period=1", f"--gin.TRAIN_STEPS={steps}"),
            f"--gin.experiment.Data.data_dir='{tmp_path / data_dir}'",
        )
        assert said.status == 0, said.err

    def losses(run: str) -> list[float]:
        return [row["loss"] for row in read_metrics(tmp_path / run) if "loss" in row]

    trained("straight", "before", 4)
    trained("moved", "before", 2)
    (tmp_path / "before").rename(tmp_path / "after")
    trained("moved", "after", 4)
    assert losses("moved") == losses("straight")
    kept = Cache(tmp_path / "after").fingerprint
    trained("straight", "after", 1, "--fresh")
    assert Cache(tmp_path / "after").fingerprint == kept
    assert not (tmp_path / "straight" / "data").exists()
    # A trained model needs no corpus to translate.
    shutil.rmtree(tmp_path / "after")
    assert len(m4.load(tmp_path / "moved").translate(["3 weeks ago"], to="gl")) == 1

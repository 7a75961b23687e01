"""Bilingual baselines in their pool of processes: trained once for the same text and settings."""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from m4.build import build
from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.experiment import Baselines, Data, Decoding, Experiment, Training
from m4.jobs.bilingual import baselines
from m4.jobs.bilingual import training as bilingual
from m4.jobs.bilingual.baselines import Finished
from m4.jobs.corpus import open_corpus
from m4.model.transformer import Transformer
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError, SavedText, SettingError
from m4.storage.checkpoints import Checkpoints, shapes
from m4.storage.files import read_json, read_jsonl
from m4.train.average import averaged
from m4.train.early_stopping import EarlyStopping
from m4.train.optimizer import adamw, muon
from m4.train.schedules import rsqrt
from tests.command_line import contents
from tests.data.corpus import Made

SIZES = {"gl": 60, "de": 90}
SCHEDULE = functools.partial(rsqrt, peak=1.2e-2, warmup_steps=2, hold_steps=4)
TRAINING = Training(
    total_steps=4,
    batch_size=8,
    optimizer=functools.partial(
        averaged, optimizer=functools.partial(muon, matrix_rate=5 / 3, schedule=SCHEDULE)
    ),
    dev_period=2,
    checkpoint_period=1000,
    keep_checkpoints=1,
    log_period=50,
    tensorboard=False,
    early_stopping=EarlyStopping(patience=9, min_delta=0.75),
)
MODEL = functools.partial(
    Transformer,
    width=16,
    heads=2,
    head_width=8,
    mlp_width=32,
    encoder_layers=1,
    decoder_layers=1,
    dropout_rate=0.0,
    absolute_positions=True,
)
# baselines.FORMAT; what the four steps had on average: loss, norm of the gradients; and the norm of
# the last average.
PINNED = (9, (5.683630, 0.826062), 26.32182)


class Made8(Made):
    """With eight test sentences: decoding is not what is tested here."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes, held_out=8)


def experiment_in(
    folder: Path,
    kept: Path,
    sizes: Mapping[str, int] = SIZES,
    training: Training = TRAINING,
    **changes: Any,
) -> Experiment:
    """A multilingual experiment in `folder` whose baselines, of `training`, are in `kept`."""
    data = Data(CorpusSpec(Made8(dict(sizes)), vocabulary_size=320))
    of_a_pair = Data(CorpusSpec(Made8(dict(sizes)), vocabulary_size=300))
    one = Experiment("unused", of_a_pair, training, MODEL, vocabulary_multiple=8)
    one = dataclasses.replace(one, **{k: v for k, v in changes.items() if k == "model"})
    return Experiment(
        str(folder),
        data,
        Training(8, 8, adamw),
        decoding=changes.get("decoding", Decoding(2, 0.6, 128, 8, 40)),
        baselines=Baselines(one, one, one, str(kept)),
    )


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, Path, dict[str, Finished]]]:
    """(the run's folder, the baselines', what is in it)."""
    run, kept = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("baselines")
    with pytest.MonkeyPatch.context() as environment:
        one_process(environment, kept)
        yield run, kept, baselines.baselines(experiment_in(run, kept))


def one_process(environment: pytest.MonkeyPatch, kept: Path) -> None:
    """Several are in tests/test_end_to_end.py; one compiles once.

    Each has one device, whatever is asked for: eight rows do not divide over sixteen.
    """
    environment.setenv("JAX_NUM_CPU_DEVICES", "16")
    environment.setenv("JAX_COMPILATION_CACHE_DIR", str(kept / "programs"))
    environment.setattr(baselines, "available_cpus", lambda: available_cpus()[:1])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what would be trained, and trains nothing."""
    asked: list[str] = []
    monkeypatch.setattr(
        baselines, "train_all", lambda missing, _: asked.extend(one.language for one in missing)
    )
    monkeypatch.setattr(baselines, "find_baselines", lambda *_: {})
    return asked


@pytest.mark.slow
def test_each_language_has_a_model_and_its_translations(trained) -> None:
    _, folder, found = trained
    assert list(found) == list(SIZES)
    for language, baseline in found.items():
        assert baseline.folder.parent == folder
        assert baseline.folder.name.startswith(f"{language}.")
        for direction in (f"en-{language}", f"{language}-en"):
            assert len(read_jsonl(baseline.folder / "decodes" / f"test.{direction}.jsonl")) == 8
        result = json.loads((baseline.folder / "result.json").read_text())
        assert result.pop("checksum")
        assert result == baseline.result
        assert result["note"]["step"] == 4
        assert result["note"]["best_step"] in (2, 4)
        assert not result["stopped_early"]  # but at the most steps
        assert result["identity"]["model"]["width"] == 16
        assert result["parameters"] > 5000
        assert set(result["epochs"]) == {f"en-{language}", f"{language}-en"}


@pytest.mark.slow
def test_an_accelerator_trains_the_same_model_in_this_process(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    _, _, found = trained
    monkeypatch.setattr(baselines, "workers_for", lambda *_: 0)
    ours = baselines.baselines(experiment_in(tmp_path, tmp_path / "kept", {"gl": 60}))["gl"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("bilingual baselines: 4/4 steps  1/1 models")
    # Over eight devices, to rounding; under the same name, as the devices decide no model.
    assert ours.folder.name == found["gl"].folder.name
    assert losses(ours) == pytest.approx(losses(found["gl"]), rel=1e-5)
    for direction in ("en-gl", "gl-en"):
        assert len(read_jsonl(ours.folder / "decodes" / f"test.{direction}.jsonl")) == 8


def test_a_pair_without_english_has_the_recipe_of_the_others(
    tmp_path: Path, asked: list[str]
) -> None:
    """Also next to pairs through a third language, which have no test sentences and no model."""
    run = experiment_in(tmp_path, tmp_path / "kept", {"gl": 60, "fr-wo": 60, "pt": 60})
    baselines.baselines(run)
    assert asked == ["gl", "pt", "fr-wo"]
    cache = open_corpus(run)
    plans = baselines.plans_of(run, cache)
    about, other = plans["fr-wo"].identity, plans["gl"].identity
    assert {name for name in about if about[name] != other[name]} == {"language", "text"}
    corpus = plans["fr-wo"].experiment.data.corpus
    assert corpus.directions() == ["fr-wo", "wo-fr"]
    spec = dataclasses.replace(run.data.corpus, mixture="any_to_any")
    pivoted = dataclasses.replace(run, data=dataclasses.replace(run.data, corpus=spec))
    pivoted = dataclasses.replace(pivoted, model_dir=str(tmp_path / "pivoted"))
    assert baselines.plans_of(pivoted, open_corpus(pivoted)).keys() == plans.keys()


@pytest.mark.slow
def test_the_model_of_a_pair_without_english_is_trained_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    one_process(monkeypatch, kept)
    found = baselines.baselines(experiment_in(tmp_path / "one", kept, {"fr-wo": 60}))
    for direction in ("fr-wo", "wo-fr"):
        path = found["fr-wo"].folder / "decodes" / f"test.{direction}.jsonl"
        assert len(read_jsonl(path)) == 8
    asked: list[str] = []
    monkeypatch.setattr(
        baselines, "train_all", lambda missing, _: asked.extend(one.language for one in missing)
    )
    with contextlib.suppress(InputError, KeyError):  # that of gl is not there
        baselines.baselines(experiment_in(tmp_path / "two", kept, {"gl": 60, "fr-wo": 60}))
    assert asked == ["gl"]


def losses(baseline: Finished) -> list[float]:
    rows = read_jsonl(baseline.folder / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("rows", "parts", "devices", "used"),
    [(8, 1, 1, 1), (8, 1, 8, 8), (8, 1, 6, 4), (12, 1, 8, 6), (7, 1, 6, 1), (8, 4, 8, 2)],
)
def test_a_baseline_takes_as_many_devices_as_divide_its_rows(
    rows: int, parts: int, devices: int, used: int
) -> None:
    training = dataclasses.replace(TRAINING, batch_size=rows, grad_accum_steps=parts)
    mesh = bilingual.mesh_for(training, jax.devices()[:devices])
    assert mesh.size == mesh.shape["data"] == used


@pytest.mark.slow
def test_languages_share_one_compiled_step(trained) -> None:
    _, folder, found = trained
    # What was compiled is kept by its text: a second step would be a second file.
    assert len(found) == 2
    assert len(list((folder / "programs").glob("jit_train_step-*-cache"))) == 1


@pytest.mark.slow
def test_the_format_is_raised_with_every_change_of_what_is_trained(trained) -> None:
    run, kept, found = trained
    rows = read_jsonl(found["gl"].folder / "metrics.jsonl")
    (about,) = ((row["loss"], row["gradient_norm"]) for row in rows if "loss" in row)
    number, pinned, pinned_norm = PINNED
    assert number == baselines.FORMAT
    levels = experiment_in(run, kept).baselines
    assert levels is not None
    model = build(levels.low, Cache(found["gl"].folder / "data")).model
    folder = found["gl"].folder / "checkpoints"
    # Its average, not its best: of two evaluations of next to nothing either may be that.
    wanted = {"average": shapes(restore_params(model, folder)[0])}
    average = Checkpoints(folder, read_only=True).restore(4, wanted)["average"]
    norm = float(optax.tree.norm(average))
    # Another momentum of Muon moves the loss by 4e-5 already.
    assert about == pytest.approx(pinned, rel=1e-5), (
        "the same settings train another model: raise baselines.FORMAT, pin again"
    )
    assert norm == pytest.approx(pinned_norm, rel=1e-5), "another average: as above"


@pytest.mark.slow
def test_training_ends_when_dev_does_not_rise_enough(
    trained, tmp_path, monkeypatch, capsys
) -> None:
    _, kept, _ = trained
    # The first evaluation is a rise, from nothing; none after it is one of 1,000 chrF.
    training = dataclasses.replace(
        TRAINING, total_steps=6, early_stopping=EarlyStopping(patience=1, min_delta=1000.0)
    )
    one_process(monkeypatch, kept)
    found = baselines.baselines(experiment_in(tmp_path, kept, {"gl": 60}, training))
    assert found["gl"].result["note"]["step"] == 4
    assert found["gl"].result["stopped_early"]
    # The two steps that were not needed are no part of the total.
    last = capsys.readouterr().out.replace("\r", "\n").splitlines()[-1]
    assert last.startswith("bilingual baselines: 4/4 steps  1/1 models")


@pytest.mark.slow
def test_what_decides_a_baseline_gives_another_folder(trained, asked) -> None:
    run, kept, _ = trained
    baselines.baselines(experiment_in(run, kept))
    assert asked == []  # what is there is found again
    model = functools.partial(MODEL, dropout_rate=0.3)
    seeded = dataclasses.replace(TRAINING, seed=1)
    baselines.baselines(experiment_in(run, kept, model=model))
    baselines.baselines(experiment_in(run, kept, training=seeded))
    baselines.baselines(experiment_in(run, kept, decoding=Decoding(2, 0.6, 128, 9, 40)))
    assert asked == [*SIZES] * 3
    two = experiment_in(run, kept)
    assert two.baselines is not None
    low = two.baselines.low
    spec = dataclasses.replace(low.data.corpus, target_vocabulary_size=290)
    low = dataclasses.replace(low, data=dataclasses.replace(low.data, corpus=spec))
    levels = dataclasses.replace(two.baselines, high=low, medium=low, low=low)
    baselines.baselines(dataclasses.replace(two, baselines=levels))
    assert asked == [*SIZES] * 4
    # How often something is written, and traced, decides nothing.
    often = dataclasses.replace(TRAINING, log_period=1, checkpoint_period=2, profile=(1, 2))
    baselines.baselines(experiment_in(run, kept, training=often))
    assert asked == [*SIZES] * 4


@pytest.mark.slow
def test_another_search_translates_again_and_trains_nothing(
    trained, tmp_path, monkeypatch, capsys
) -> None:
    run, kept, _ = trained
    one_process(monkeypatch, kept)
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    decoding = Decoding(1, 0.6, 128, 8, 20, test_sentences=5)
    found = baselines.baselines(experiment_in(run, tmp_path, decoding=decoding))
    said = capsys.readouterr().out
    assert "baselines: 2 trained models to translate their test sets" in said
    assert "to train" not in said
    for language, one in found.items():
        before, after = (at / one.folder.name for at in (kept, tmp_path))
        assert contents(after / "checkpoints") == contents(before / "checkpoints")
        assert one.decodes == after / "decodes" / one.decodes.name
        assert "beams=1" in one.decodes.name
        assert len(read_jsonl(one.decodes / f"test.{language}-en.jsonl")) == 5
        shutil.rmtree(one.decodes)  # All else is as it was.
        assert contents(after / "decodes") == contents(before / "decodes")
        assert one.result == read_json(before / "result.json")


@pytest.mark.slow
def test_a_folder_that_a_saved_config_names_is_read_and_never_written(trained, asked) -> None:
    run, kept, _ = trained
    saved = experiment_in(run, kept)
    assert saved.baselines is not None
    levels = dataclasses.replace(saved.baselines, folder=SavedText(kept))
    baselines.baselines(dataclasses.replace(saved, baselines=levels))  # all is there
    empty = dataclasses.replace(levels, folder=SavedText(kept / "empty"))
    with pytest.raises(SettingError, match="a saved config names no folder to write to"):
        baselines.baselines(dataclasses.replace(saved, baselines=empty))
    assert asked == []
    unwritable = dataclasses.replace(levels, folder="/proc/x")
    with pytest.raises(InputError, match=r"^Baselines\.folder = /proc/x: cannot be written"):
        baselines.baselines(dataclasses.replace(saved, baselines=unwritable))


def test_other_languages_of_the_corpus_do_not_matter(trained, tmp_path, asked) -> None:
    # Another multilingual run: one language more, first in the arrays, and one gone. (Where the
    # lengths leave pairs out, the vocabulary decides which; here they leave out none.)
    _, kept, _ = trained
    baselines.baselines(experiment_in(tmp_path / "more", kept, {"fr": 70, "gl": 60}))
    assert asked == ["fr"]
    # Changed text does.
    baselines.baselines(experiment_in(tmp_path / "fewer", kept, {"gl": 59}))
    assert asked == ["fr", "gl"]


@pytest.mark.slow
def test_an_unfinished_one_is_not_reused(trained, asked, tmp_path) -> None:
    # Killed before result.json: everything else may be there.
    run, _, found = trained
    half = tmp_path / found["gl"].folder.name
    (half / "decodes").mkdir(parents=True)
    baselines.baselines(experiment_in(run, tmp_path))
    assert asked == [*SIZES]


def test_a_baseline_has_the_directions_of_the_multilingual_model(tmp_path: Path) -> None:
    both = experiment_in(tmp_path / "both", tmp_path / "kept", {"gl": 60})
    corpus = dataclasses.replace(both.data.corpus, mixture="to_english")
    data = dataclasses.replace(both.data, corpus=corpus)
    one = dataclasses.replace(both, model_dir=str(tmp_path / "one"), data=data)
    plans = [baselines.plans_of(each, open_corpus(each))["gl"] for each in (both, one)]
    of_both, of_one = (plan.experiment.data.corpus.directions(["gl"]) for plan in plans)
    assert (of_both, of_one) == (["en-gl", "gl-en"], ["gl-en"])
    assert plans[0].folder != plans[1].folder


def test_a_report_trains_nothing(tmp_path: Path) -> None:
    experiment = experiment_in(tmp_path / "run", tmp_path / "kept")
    cache = open_corpus(experiment)
    with pytest.raises(ValueError, match=r"no bilingual baseline of gl, de: .* m4 baselines --mod"):
        baselines.find_baselines(experiment, cache)


def test_gain_of_the_last_quarter() -> None:
    # Best of all 12.5; of steps <= 75 % of 400 = 300: 11. Rows of training have no dev.
    scores = {100: 10.0, 200: 11.0, 300: 10.5, 400: 12.5}
    rows = [{"step": 50, "nll": 1.0}, *({"step": s, "dev/chrf": c} for s, c in scores.items())]
    assert bilingual.gain_last_quarter(rows, 400) == 1.5
    # A single evaluation, at the end: all of it is late.
    assert bilingual.gain_last_quarter(rows[-1:], 400) == 12.5

"""Bilingual baselines in their pool of processes: made once for the same text and recipe."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import optax
import pytest

from m4.data.cache import cache as caches
from m4.data.corpus import CorpusSpec
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.progress import ProgressBar
from m4.storage.checkpoints import Checkpoints, shapes
from m4.storage.files import read_jsonl
from m4.train import baselines
from m4.train.baselines import Finished, Recipe, late_gain, train_baselines
from tests.data.corpus import Made

RECIPE = Recipe(
    width=16,
    heads=2,
    head_width=8,
    mlp_width=32,
    layers=1,
    vocabulary_size=300,
    warmup_steps=2,
    max_steps=4,
    eval_period=2,
    patience=9,
)
SIZES = {"gl": 60, "de": 90}
DECODING = {"beams": 2, "max_source_length": 128, "max_target_length": 8, "batch_rows": 40}


# baselines.FORMAT; what the four steps had on average: loss, norm of the gradients; and the norm of
# the last average.
PINNED = (4, (5.683630, 0.826062), 26.32182)


class Made8(Made):
    """With eight test sentences: decoding is not what is tested here."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes, held_out=8)


def corpus_of(folder: Path, sizes: dict[str, int]) -> Path:
    CorpusSpec(Made8(sizes), vocabulary_size=320, lengths={"inputs": 128, "targets": 128}).build(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus_of(tmp_path_factory.mktemp("corpus") / "data", SIZES)


@pytest.fixture(scope="module")
def trained(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Finished], str]]:
    """(folder, what is in it, what was shown)."""
    folder, shown = tmp_path_factory.mktemp("baselines"), io.StringIO()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAX_NUM_CPU_DEVICES", "1")  # of the worker processes
        environment.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        found = train_baselines(
            folder,
            corpus,
            list(SIZES),
            lambda language: RECIPE,
            decoding=DECODING,
            workers=1,  # several are in tests/test_end_to_end.py; one compiles once
            stage=lambda name, total, unit: ProgressBar(name, total, unit, shown),
        )
        yield folder, found, shown.getvalue()


@pytest.fixture
def no_pool(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be trained: nothing is."""
    asked: list[str] = []
    monkeypatch.setattr(baselines, "_run", lambda plans, *_: asked.extend(plans))
    monkeypatch.setattr(baselines, "_expect", lambda plan: plan["folder"])
    return asked


@pytest.mark.slow
def test_each_language_has_a_model_and_its_translations(trained) -> None:
    folder, found, shown = trained
    assert list(found) == list(SIZES)
    for language, baseline in found.items():
        assert baseline.folder.parent == folder
        assert baseline.folder.name.startswith(f"{language}.")
        for direction in (f"en-{language}", f"{language}-en"):
            assert len(read_jsonl(baseline.folder / "decodes" / f"test.{direction}.jsonl")) == 8
        result = json.loads((baseline.folder / "result.json").read_text())
        assert result == baseline.result
        assert result["note"]["step"] == 4
        assert result["note"]["best_step"] in (2, 4)
        assert not result["ended_by_dev"]  # but by max_steps
        assert result["plan"]["recipe"] == dataclasses.asdict(RECIPE)
        assert result["parameters"] > 5000
        assert set(result["epochs"]) == {f"en-{language}", f"{language}-en"}
    assert shown.splitlines()[-1].startswith("bilingual baselines: 8/8 steps  2/2 models")


@pytest.mark.slow
def test_languages_share_one_compiled_step(trained) -> None:
    folder, found, _ = trained
    # What was compiled is kept by its text: a second step would be a second file.
    assert len(found) == 2
    assert len(list((folder / "programs").glob("jit_train_step-*-cache"))) == 1


@pytest.mark.slow
def test_the_format_is_raised_with_every_change_of_what_is_trained(trained) -> None:
    _, found, _ = trained
    rows = read_jsonl(found["gl"].folder / "metrics.jsonl")
    (about,) = ((row["loss"], row["gradient_norm"]) for row in rows if "loss" in row)
    number, pinned, pinned_norm = PINNED
    assert number == baselines.FORMAT
    cache = caches.Cache(found["gl"].folder / "data")
    model = baselines._model(RECIPE, cache)
    folder = found["gl"].folder / "checkpoints"
    # Its average, not its best: of two evaluations of next to nothing either may be that.
    wanted = {"average": shapes(restore_params(model, folder)[0])}
    average = Checkpoints(folder, read_only=True).restore(4, wanted)["average"]
    norm = float(optax.tree.norm(average))
    # Another momentum of Muon moves the loss by 4e-5 already.
    assert about == pytest.approx(pinned, rel=1e-5), (
        "the same recipe trains another model: raise FORMAT in m4/train/baselines.py, pin anew"
    )
    assert norm == pytest.approx(pinned_norm, rel=1e-5), "another average: as above"


@pytest.mark.slow
def test_training_ends_when_dev_does_not_rise_enough(trained, corpus, monkeypatch) -> None:
    folder, _, _ = trained
    # The first evaluation is a rise, from nothing; none after it is one of 1,000 chrF.
    recipe = dataclasses.replace(RECIPE, max_steps=6, patience=1, least_gain=1000.0)
    shown = io.StringIO()
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    found = train_baselines(
        folder,
        corpus,
        ["gl"],
        lambda language: recipe,
        decoding=DECODING,
        workers=1,
        stage=lambda name, total, unit: ProgressBar(name, total, unit, shown),
    )
    assert found["gl"].result["note"]["step"] == 4
    assert found["gl"].result["ended_by_dev"]
    # The two steps that were not needed are no part of the whole.
    assert (
        shown.getvalue().splitlines()[-1].startswith("bilingual baselines: 4/4 steps  1/1 models")
    )


@pytest.mark.slow
def test_what_is_there_is_reused_without_a_process(trained, corpus, no_pool) -> None:
    folder, found, _ = trained
    again = train_baselines(folder, corpus, list(SIZES), lambda _: RECIPE, decoding=DECODING)
    assert no_pool == []
    assert again == {language: str(one.folder) for language, one in found.items()}


@pytest.mark.slow
def test_what_decides_a_baseline_gives_another_folder(trained, corpus, no_pool) -> None:
    folder, found, _ = trained
    other = dataclasses.replace(RECIPE, dropout_rate=0.3)
    recipes = {"gl": other, "de": RECIPE}
    changed = train_baselines(folder, corpus, list(SIZES), recipes.__getitem__, decoding=DECODING)
    assert no_pool == ["gl"]
    assert changed["gl"] != str(found["gl"].folder)
    assert changed["de"] == str(found["de"].folder)
    for settings in ({"seed": 1}, {"decoding": {**DECODING, "beams": 4}}):
        arguments = {"decoding": DECODING, **settings}
        train_baselines(folder, corpus, ["de"], lambda _: RECIPE, **arguments)
    assert no_pool == ["gl", "de", "de"]


@pytest.mark.slow
def test_other_languages_of_the_corpus_do_not_matter(trained, tmp_path, no_pool) -> None:
    # Another multilingual run: one language more, first in the arrays, and one gone. (Where the
    # lengths leave pairs out, the vocabulary decides which; here they leave out none.)
    folder, found, _ = trained
    more = corpus_of(tmp_path / "data", {"fr": 70, "gl": 60})
    again = train_baselines(folder, more, ["gl"], lambda _: RECIPE, decoding=DECODING)
    assert no_pool == []
    assert again["gl"] == str(found["gl"].folder)
    # Changed text does.
    fewer = corpus_of(tmp_path / "fewer", {"gl": 59})
    train_baselines(folder, fewer, ["gl"], lambda _: RECIPE, decoding=DECODING)
    assert no_pool == ["gl"]


@pytest.mark.slow
def test_an_unfinished_one_is_not_reused(trained, corpus, no_pool, tmp_path) -> None:
    # Killed before result.json: everything else may be there.
    _, found, _ = trained
    half = tmp_path / found["gl"].folder.name
    half.mkdir()
    (half / "decodes").mkdir()
    train_baselines(tmp_path, corpus, ["gl"], lambda _: RECIPE, decoding=DECODING)
    assert no_pool == ["gl"]


def test_late_gain() -> None:
    # Best of all 12.5; of steps <= 75 % of 400 = 300: 11. Rows of training say nothing of dev.
    scores = {100: 10.0, 200: 11.0, 300: 10.5, 400: 12.5}
    rows = [{"step": 50, "nll": 1.0}, *({"step": s, "dev/chrf": c} for s, c in scores.items())]
    assert late_gain(rows, 400) == 1.5
    # A single evaluation, at the end: all of it is late.
    assert late_gain(rows[-1:], 400) == 12.5

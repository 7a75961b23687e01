"""Bilingual baselines in their pool of processes: trained once for the same text and settings."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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
from m4.jobs import bilingual
from m4.jobs.bilingual import Baseline
from m4.jobs.corpus import open_corpus
from m4.model.transformer import Transformer
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError, SavedText, SettingError
from m4.storage.checkpoints import Checkpoints, shapes
from m4.storage.files import read_json, read_jsonl
from m4.train.average import averaged
from m4.train.early_stopping import EarlyStopping
from m4.train.loop import Interrupted
from m4.train.optimizer import adamw, muon
from m4.train.run import stop_signals
from m4.train.schedules import rsqrt
from tests.command_line import contents, descendants
from tests.data.corpus import Made

SIZES = {"gl": 60, "fr-wo": 60}
SCHEDULE = functools.partial(rsqrt, peak=1.2e-2, warmup_steps=2, hold_steps=4)
MUON = functools.partial(muon, matrix_rate=5 / 3, schedule=SCHEDULE)
TRAINING = Training(
    total_steps=4, batch_size=8,
    optimizer=functools.partial(averaged, optimizer=MUON), dev_period=2, checkpoint_period=1000,
    keep_checkpoints=1, log_period=50, tensorboard=False,
    early_stopping=EarlyStopping(patience=9, min_delta=0.75),
)  # fmt: skip
MODEL = functools.partial(
    Transformer, width=16, heads=2, head_width=8, mlp_width=32, encoder_layers=1, decoder_layers=1,
    dropout_rate=0.0, absolute_positions=True,
)  # fmt: skip
# bilingual.FORMAT; what the four steps had on average: loss, norm of the gradients; and the norm of
# the last average.
PINNED = (9, (5.683630, 0.826062), 26.32182)


class Made8(Made):
    """Corpus with eight test sentences, as decoding is not tested here."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes, held_out=8)


def experiment_in(
    folder: Path, kept: Path, sizes: Mapping[str, int] = SIZES, training: Training = TRAINING,
    **changes: Any,
) -> Experiment:  # fmt: skip
    """Returns a multilingual experiment in `folder` with baselines of `training` in `kept`."""
    data = Data(CorpusSpec(Made8(dict(sizes)), vocabulary_size=320))
    of_a_pair = Data(CorpusSpec(Made8(dict(sizes)), vocabulary_size=300))
    one = Experiment("unused", of_a_pair, training, MODEL, vocabulary_multiple=8)
    one = dataclasses.replace(one, **{k: v for k, v in changes.items() if k == "model"})
    return Experiment(
        str(folder), data, Training(8, 8, adamw),
        decoding=changes.get("decoding", Decoding(2, 0.6, 128, 8, 40)),
        baselines=Baselines(one, one, one, str(kept)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, Path, dict[str, Baseline]]]:
    """Returns the run's folder, the baselines' folder and its content."""
    run, kept = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("baselines")
    with pytest.MonkeyPatch.context() as environment:
        one_process(environment, kept)
        yield run, kept, bilingual.baselines(experiment_in(run, kept))


def one_process(environment: pytest.MonkeyPatch, kept: Path) -> None:
    """Makes baselines train in one process, which compiles once; test_end_to_end.py has several.

    Each has one device, whatever is asked for: eight rows do not divide over sixteen.
    """
    environment.setenv("JAX_NUM_CPU_DEVICES", "16")
    environment.setenv("JAX_COMPILATION_CACHE_DIR", str(kept / "programs"))
    environment.setattr(bilingual, "available_cpus", lambda: available_cpus()[:1])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what would be trained, and trains nothing."""
    asked: list[str] = []
    monkeypatch.setattr(
        bilingual, "train_all", lambda missing, _: asked.extend(one.language for one in missing)
    )
    monkeypatch.setattr(bilingual, "find_baselines", lambda *_: {})
    return asked


@pytest.mark.slow
def test_each_language_has_a_model_and_its_translations(trained) -> None:
    _, folder, found = trained
    assert list(found) == list(SIZES)
    for language, baseline in found.items():
        assert baseline.folder.parent == folder
        assert baseline.folder.name.startswith(f"{language}.")
        directions = {"gl": {"en-gl", "gl-en"}, "fr-wo": {"fr-wo", "wo-fr"}}[language]
        for direction in directions:
            assert len(read_jsonl(baseline.folder / "decodes" / f"test.{direction}.jsonl")) == 8
        result = json.loads((baseline.folder / "result.json").read_text())
        assert result.pop("checksum")
        assert result == baseline.result
        assert result["note"]["step"] == 4
        assert result["note"]["best_step"] in (2, 4)
        assert not result["stopped_early"]  # but at the most steps
        assert result["identity"]["model"]["width"] == 16
        assert result["parameters"] > 5000
        assert set(result["epochs"]) == directions


@pytest.mark.slow
@pytest.mark.thorough
def test_an_accelerator_trains_in_this_process_until_dev_does_not_rise_enough(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    _, _, found = trained
    monkeypatch.setattr(bilingual, "workers_for", lambda *_: 0)
    # The first evaluation is a rise, from nothing; none after it is one of 1,000 chrF.
    rule = EarlyStopping(patience=1, min_delta=1000.0)
    training = dataclasses.replace(TRAINING, total_steps=6, log_period=4, early_stopping=rule)
    ours = bilingual.baselines(experiment_in(tmp_path, tmp_path / "kept", {"gl": 60}, training))
    # The two steps that were not needed are no part of the total.
    last = capsys.readouterr().out.replace("\r", "\n").splitlines()[-1]
    assert last.startswith("bilingual baselines: 4/4 steps  1/1 models")
    assert ours["gl"].result["note"]["step"] == 4
    assert ours["gl"].result["stopped_early"]
    # Over eight devices, to rounding.
    assert losses(ours["gl"]) == pytest.approx(losses(found["gl"]), rel=1e-5)


def test_a_pair_without_english_has_the_recipe_of_the_others(
    tmp_path: Path, asked: list[str]
) -> None:
    """Also next to pairs through a third language, which have no test sentences and no model."""
    run = experiment_in(tmp_path, tmp_path / "kept", {"gl": 60, "fr-wo": 60, "pt": 60})
    bilingual.baselines(run)
    assert asked == ["gl", "pt", "fr-wo"]
    cache = open_corpus(run)
    plans = bilingual.plans_of(run, cache)
    about, other = plans["fr-wo"].identity, plans["gl"].identity
    assert {name for name in about if about[name] != other[name]} == {"language", "text"}
    corpus = plans["fr-wo"].experiment.data.corpus
    assert corpus.directions() == ["fr-wo", "wo-fr"]
    spec = dataclasses.replace(run.data.corpus, mixture="any_to_any")
    pivoted = dataclasses.replace(run, data=dataclasses.replace(run.data, corpus=spec))
    pivoted = dataclasses.replace(pivoted, model_dir=str(tmp_path / "pivoted"))
    assert bilingual.plans_of(pivoted, open_corpus(pivoted)).keys() == plans.keys()


def losses(baseline: Baseline) -> list[float]:
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
    assert number == bilingual.FORMAT
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
        "the same settings train another model: raise bilingual.FORMAT, pin again"
    )
    assert norm == pytest.approx(pinned_norm, rel=1e-5), "another average: as above"


@pytest.mark.slow
def test_what_decides_a_baseline_gives_another_folder(trained, asked) -> None:
    run, kept, _ = trained
    bilingual.baselines(experiment_in(run, kept))
    assert asked == []  # what is there is found again
    model = functools.partial(MODEL, dropout_rate=0.3)
    seeded = dataclasses.replace(TRAINING, seed=1)
    bilingual.baselines(experiment_in(run, kept, model=model))
    bilingual.baselines(experiment_in(run, kept, training=seeded))
    bilingual.baselines(experiment_in(run, kept, decoding=Decoding(2, 0.6, 128, 9, 40)))
    assert asked == [*SIZES] * 3
    two = experiment_in(run, kept)
    assert two.baselines is not None
    low = two.baselines.low
    spec = dataclasses.replace(low.data.corpus, target_vocabulary_size=290)
    low = dataclasses.replace(low, data=dataclasses.replace(low.data, corpus=spec))
    levels = dataclasses.replace(two.baselines, high=low, medium=low, low=low)
    bilingual.baselines(dataclasses.replace(two, baselines=levels))
    assert asked == [*SIZES] * 4
    # How often something is written, and traced, decides nothing.
    often = dataclasses.replace(TRAINING, log_period=1, checkpoint_period=2, profile=(1, 2))
    bilingual.baselines(experiment_in(run, kept, training=often))
    assert asked == [*SIZES] * 4


@pytest.mark.slow
def test_another_search_translates_again_and_trains_nothing(
    trained, tmp_path, monkeypatch, capsys
) -> None:
    run, kept, _ = trained
    one_process(monkeypatch, kept)
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    decoding = Decoding(1, 0.6, 128, 8, 20, test_sentences=5)
    found = bilingual.baselines(experiment_in(run, tmp_path, decoding=decoding))
    said = capsys.readouterr().out
    assert "baselines: 2 trained models to translate their test sets" in said
    assert "to train" not in said
    for one in found.values():
        before, after = (at / one.folder.name for at in (kept, tmp_path))
        assert contents(after / "checkpoints") == contents(before / "checkpoints")
        assert one.decodes == after / "decodes" / one.decodes.name
        assert "beams=1" in one.decodes.name
        assert {len(read_jsonl(path)) for path in one.decodes.glob("test.*.jsonl")} == {5}
        shutil.rmtree(one.decodes)  # All else is as it was.
        assert contents(after / "decodes") == contents(before / "decodes")
        assert one.result == read_json(before / "result.json")


@pytest.mark.slow
def test_a_folder_that_a_saved_config_names_is_read_and_never_written(trained, asked) -> None:
    run, kept, _ = trained
    saved = experiment_in(run, kept)
    assert saved.baselines is not None
    levels = dataclasses.replace(saved.baselines, folder=SavedText(kept))
    bilingual.baselines(dataclasses.replace(saved, baselines=levels))  # all is there
    empty = dataclasses.replace(levels, folder=SavedText(kept / "empty"))
    with pytest.raises(SettingError, match="a saved config names no folder to write to"):
        bilingual.baselines(dataclasses.replace(saved, baselines=empty))
    assert asked == []
    unwritable = dataclasses.replace(levels, folder="/proc/x")
    with pytest.raises(InputError, match=r"^Baselines\.folder = /proc/x: cannot be written"):
        bilingual.baselines(dataclasses.replace(saved, baselines=unwritable))


def test_other_languages_of_the_corpus_do_not_matter(trained, tmp_path, asked) -> None:
    # Another multilingual run: one language more, first in the arrays, and one gone. (Where the
    # lengths leave pairs out, the vocabulary decides which; here they leave out none.)
    _, kept, _ = trained
    bilingual.baselines(experiment_in(tmp_path / "more", kept, {"fr": 70, "gl": 60}))
    assert asked == ["fr"]
    # Changed text does.
    bilingual.baselines(experiment_in(tmp_path / "fewer", kept, {"gl": 59}))
    assert asked == ["fr", "gl"]


@pytest.mark.slow
def test_an_unfinished_one_is_not_reused(trained, asked, tmp_path) -> None:
    # Killed before result.json: everything else may be there.
    run, _, found = trained
    half = tmp_path / found["gl"].folder.name
    (half / "decodes").mkdir(parents=True)
    bilingual.baselines(experiment_in(run, tmp_path))
    assert asked == [*SIZES]


def test_a_baseline_has_the_directions_of_the_multilingual_model(tmp_path: Path) -> None:
    both = experiment_in(tmp_path / "both", tmp_path / "kept", {"gl": 60})
    corpus = dataclasses.replace(both.data.corpus, mixture="to_english")
    data = dataclasses.replace(both.data, corpus=corpus)
    one = dataclasses.replace(both, model_dir=str(tmp_path / "one"), data=data)
    plans = [bilingual.plans_of(each, open_corpus(each))["gl"] for each in (both, one)]
    of_both, of_one = (plan.experiment.data.corpus.directions(["gl"]) for plan in plans)
    assert (of_both, of_one) == (["en-gl", "gl-en"], ["gl-en"])
    assert plans[0].folder != plans[1].folder


def test_a_report_trains_nothing(tmp_path: Path) -> None:
    experiment = experiment_in(tmp_path / "run", tmp_path / "kept")
    cache = open_corpus(experiment)
    with pytest.raises(ValueError, match=r"no bilingual baseline of gl, fr-wo: .* m4 basel"):
        bilingual.find_baselines(experiment, cache)


def test_gain_of_the_last_quarter() -> None:
    # Best of all 12.5; of steps <= 75 % of 400 = 300: 11. Rows of training have no dev.
    scores = {100: 10.0, 200: 11.0, 300: 10.5, 400: 12.5}
    rows = [{"step": 50, "nll": 1.0}, *({"step": s, "dev/chrf": c} for s, c in scores.items())]
    assert bilingual.gain_last_quarter(rows, 400) == 1.5
    # A single evaluation, at the end: all of it is late.
    assert bilingual.gain_last_quarter(rows[-1:], 400) == 12.5


# -------- the pool of processes: signals, and how its processes end


def train_until_stopped(one: Any) -> tuple[str, int]:
    """Runs a worker's task whose training is a loop that saves when a signal comes."""

    def train_one(one: Any, *_: Any) -> tuple[str, int]:
        folder = Path(one.folder)
        folder.mkdir()
        with stop_signals() as received:
            (folder / "started").touch()
            while not received:
                time.sleep(0.05)
            time.sleep(0.5)
            (folder / "saved").touch()
        raise Interrupted(7)

    bilingual.train_one = train_one
    return bilingual.train_in_worker(one)


POOL = """
import sys
from pathlib import Path
from types import SimpleNamespace
from m4.jobs import bilingual as training
from m4.parallel.platform import signals
from m4.progress import ProgressBar
from tests.jobs.test_baselines import train_until_stopped

if __name__ == "__main__":
    signals.install()
    signals.watch()
    training.train_in_worker = train_until_stopped
    folders = [Path(sys.argv[1]) / name for name in ("gl", "de", "es")]
    plans = [SimpleNamespace(folder=folder, language=folder.name) for folder in folders]
    shown = training.Progress({folder.name: 9 for folder in folders})
    try:
        training._train_in_workers(plans, shown, ProgressBar("baselines", 27), 2)
    except signals.Stopped as stopped:
        sys.exit(stopped.status)
"""


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.thorough),  # as a terminal sends it
    ],
)
def test_workers_save_and_end_with_their_parent(
    tmp_path: Path, number: signal.Signals, whole_group: bool
) -> None:
    program, kept = tmp_path / "pool.py", tmp_path / "kept"
    program.write_text(POOL)
    kept.mkdir()
    mark = {"M4_TEST": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, str(program), str(kept)], env={**os.environ, **mark}, process_group=0
    )
    try:
        wait_until(lambda: len(list(kept.glob("*/started"))) == 2)
        assert len(descendants(tmp_path)) >= 3
        (os.killpg if whole_group else os.kill)(parent.pid, number)
        assert parent.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not descendants(tmp_path))
        saved = sorted(path.parent.name for path in kept.glob("*/saved"))
        assert saved == ([] if number == signal.SIGKILL else ["de", "gl"])
    finally:
        parent.kill()
        parent.wait()


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)

"""A run whose config changes on the way (`m4 train --new_chapter`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4 import config
from m4.storage.checkpoints import Checkpoints
from m4.storage.files import read_jsonl
from tests.command_line import TINY, Said, m4
from tests.jobs.checkpoints.test_initial import saved
from tests.train.trainers import timeless_rows

CHANGES = ("--gin.schedules.rsqrt.peak=5e-4", "--gin.BATCH_SIZE=16")


def train(folder: Path, *arguments: object) -> Said:
    return m4("train", f"--gin_file={TINY}", f"--model_dir={folder}", *arguments)


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def note(folder: Path, step: int) -> dict[str, Any]:
    store = Checkpoints(folder / "checkpoints", read_only=True)
    try:
        return store.note(step)
    finally:
        store.close()


def assert_equal(one: Path, other: Path, step: int) -> None:
    for item in ("params", "optimizer"):
        a, b = saved(one, step, item), saved(other, step, item)
        assert jax.tree.all(jax.tree.map(np.array_equal, a, b)), item
    assert timeless_rows(one) == timeless_rows(other)
    notes = [note(folder, step) for folder in (one, other)]
    for name in ("chapter", "chapter_start", "position", "stream", "seen", "assigned"):
        assert notes[0][name] == notes[1][name], name


@pytest.fixture
def run(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "run"))


def test_no_chapter_begins_without_the_flag(run: Path) -> None:
    said = train(run, *CHANGES)
    assert "schedules.rsqrt.peak is 0.001 there and 0.0005 here" in said.mistake
    assert "experiment.Training.batch_size" in said.mistake
    assert "m4 train --new_chapter" in said.mistake
    never = train(run, "--new_chapter", "--gin.transformer.Transformer.width=32")
    assert "transformer.Transformer.width is 16 there and 32 here" in never.mistake
    assert "--new_chapter" not in never.mistake
    nothing = train(run, "--new_chapter", "--gin.TRAIN_STEPS=6")
    assert "nothing has changed since chapter 1" in nothing.mistake
    assert "start over with --fresh" in never.mistake
    assert "chapters" not in record(run)
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint yet" in train(run, "--new_chapter", *CHANGES).mistake
    lost = train(run, "--new_chapter", "--fresh", *CHANGES)
    assert "a run that starts over has one chapter" in lost.mistake


def test_resume_in_a_chapter_is_bit_equal(run: Path, tmp_path: Path) -> None:
    began = train(run, "--new_chapter=slower", *CHANGES, "--gin.TRAIN_STEPS=8")
    assert began.status == 0, began.err
    assert "chapter 2 begins after step 4: " in began.out
    assert "the optimizer's state: kept" in began.out
    # As if it had been killed before the chapter's first checkpoint, and after it.
    killed = Path(shutil.copytree(run, tmp_path / "killed"))
    for steps in ((6, 8), (8,)):
        for step in steps:
            shutil.rmtree(killed / "checkpoints" / str(step))
        # The command that began it resumes it, as a supervisor needs it.
        again = train(killed, "--new_chapter=slower", *CHANGES, "--gin.TRAIN_STEPS=8")
        assert again.status == 0, again.err
        assert ("chapter 2 begins" in again.out) == (len(steps) == 2)
        assert_equal(run, killed, 8)

    one, two = record(run)["chapters"]
    assert (one["chapter"], one["step"], two["chapter"], two["step"]) == (1, 0, 2, 4)
    assert (two["reason"], two["optimizer"], two["text"]) == ("slower", "kept", [])
    assert two["changes"] == {
        "schedules.rsqrt.peak": ["0.001", "0.0005"],
        "experiment.Training.batch_size": ["8", "16"],
    }
    # The config of each chapter can be read again.
    for folder, peak in ((run / "chapters" / "1", "0.001"), (run, "0.0005")):
        made = config.load([folder / "config.gin"], allowed_modules=())
        made.experiment()
        assert made.settings["schedules.rsqrt.peak"] == peak


@pytest.mark.slow
@pytest.mark.thorough
def test_an_optimizer_with_other_arrays_begins_from_zero(run: Path) -> None:
    muon = (
        "--gin.experiment.Training.optimizer=@optimizer.muon",
        "--gin.optimizer.muon.schedule=@schedules.rsqrt", "--gin.TRAIN_STEPS=6",
    )  # fmt: skip
    said = train(run, "--new_chapter", *muon)
    assert said.status == 0, said.err
    assert "the optimizer's state: from zero" in said.out
    assert record(run)["chapters"][1]["optimizer"].startswith("from zero")
    # Its learning rate is that of the step all the same.
    counts = [int(x) for x in jax.tree.leaves(saved(run, 6, "optimizer")) if x.ndim == 0]
    assert {*counts} == {2, 6}
    back = train(run, "--new_chapter=back", "--gin.TRAIN_STEPS=8")
    assert back.status == 0, back.err
    assert [one["step"] for one in record(run)["chapters"]] == [0, 4, 6]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_chapter_without_a_checkpoint_is_replaced(run: Path) -> None:
    assert train(run, "--new_chapter=wrong", "--gin.BATCH_SIZE=16").status == 0  # no step to train
    assert train(run, "--new_chapter=right", *CHANGES, "--gin.TRAIN_STEPS=6").status == 0
    _, two = record(run)["chapters"]
    assert (two["chapter"], two["step"], two["reason"]) == (2, 4, "right")
    assert {*two["changes"]} == {"schedules.rsqrt.peak", "experiment.Training.batch_size"}


def check_the_chapter_before(run: Path) -> None:
    """Its last checkpoint, whose vocabulary was smaller, is used as before."""
    for split in ("test", "dev"):
        scored = m4("eval", f"--model_dir={run}", "--step=4", f"--split={split}")
        assert scored.status == 0, scored.err
    rows = read_jsonl(run / "decodes" / "4" / "scores.jsonl")
    assert {row["chapter"] for row in rows if row["system"] == "moe"} == {1}
    assert {row["direction"] for row in rows} & {"en-el", "en-gl"} == {"en-gl"}
    followed = m4("eval", f"--model_dir={run}", "--steps=all", "--sentences=5")
    assert followed.status == 0, followed.err
    curve = [row for row in read_jsonl(run / "scores_by_step.jsonl") if row["level"] == "all"]
    found = {row["step"]: (row["chapter"], row["directions"], row["best"]) for row in curve[::-1]}
    assert found == {2: (1, 6, False), 4: (1, 6, False), 6: (2, 8, True)}
    other = m4("eval", f"--model_dir={run}", "--steps=4", "--directions=en-el")
    assert "step 4 is of a chapter without en-el; its directions are en-" in other.mistake
    gone = m4("explain", run, "--step=3")
    assert f"the corpus of chapter 1 is gone: {run}/data was built again for chapter 2 (" in (
        gone.mistake
    )
    check_means_by_chapter(run)
    alone = run.parent / "alone"
    assert m4("checkpoint", "convert", run, "--step=4", f"--output={alone}").status == 0
    assert m4("translate", f"--model_dir={alone}", "--to=gl", "3 weeks ago").status == 0


def check_means_by_chapter(run: Path) -> None:
    """A mean of steps of the chapter before is used with its vocabulary."""
    apart = m4("average", run, "--steps=4,6").mistake
    assert "--steps=4,6: steps 4 and 6 are of chapters with different vocabularies" in apart
    mean = run.parent / "mean"
    said = m4("average", run, "--steps=2,4", f"--output={mean}")
    assert said.status == 0, said.err
    for job in (("translate", "--to=gl", "3 weeks ago"), ("eval",)):
        said = m4(job[0], f"--model_dir={mean}", *job[1:])
        assert said.status == 0, said.err
    rows = read_jsonl(mean / "scores.jsonl")
    assert {row["chapter"] for row in rows if row["system"] == "moe"} == {1}
    assert m4("average", run, "--steps=2,4", f"--output={mean}").status == 0  # it stays


@pytest.mark.slow
@pytest.mark.thorough
def test_steps_of_each_chapter_are_explained_with_its_config(run: Path) -> None:
    each = ("--gin.experiment.Training.log_period=1", "--gin.TRAIN_STEPS=7")
    assert train(run, "--new_chapter", *CHANGES, *each).status == 0
    rows = {row["step"]: row for row in timeless_rows(run) if "loss" in row}
    for step in (4, 5, 7):
        said = m4("explain", run, f"--step={step}", "--replay", "--pairs=1")
        assert said.status == 0, said.err
        about = json.loads((run / f"explain.{step}.json").read_text())
        assert about["parameters_of_step"] == step - 1
        if step > 4:  # a row of chapter 1 is of two steps
            loss, norm = (about["step_metrics"][name] for name in ("loss", "gradient_norm"))
            assert (loss, norm) == (rows[step]["loss"], rows[step]["gradient_norm"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_language_more(run: Path) -> None:
    grown = (
        "--gin.cldr.Cldr.sizes={'el': 80, 'es': 150, 'pt': 100, 'gl': 60}",
        "--gin.TRAIN_STEPS=6",
    )
    small = train(run, "--new_chapter", *grown)
    assert "CorpusSpec.vocabulary_size = 400" in small.mistake
    assert "at least 401: the trained vocabulary and 1 new tags" in small.mistake
    size = "--gin.corpus.CorpusSpec.vocabulary_size=520"
    assert train(run, "--new_chapter=greek", *grown, size, "--gin.TRAIN_STEPS=4").status == 0
    # It has no checkpoint yet: the last one is used with the vocabulary that it was trained with.
    translated = m4("translate", f"--model_dir={run}", "--to=gl", "3 weeks ago")
    assert translated.status == 0, translated.err
    said = train(run, *grown, size)
    assert said.status == 0, said.err
    assert "the optimizer's state: kept, grown" in said.out
    before, now = note(run, 4), note(run, 6)
    assert {*now["seen"]["directions"]} == {*before["seen"]["directions"], "en-el", "el-en"}
    for name, count in before["seen"]["directions"].items():
        assert now["seen"]["directions"][name]["pairs"] >= count["pairs"]
    was, here = (saved(run, step)["token_embedder"]["embedding"] for step in (4, 6))
    assert (len(was), len(here)) == (512, 640)
    check_the_chapter_before(run)
    lost = train(run, "--new_chapter", "--gin.corpus.CorpusSpec.vocabulary_size=520")
    assert "the corpus has el no more" in lost.mistake

    scored = m4("eval", f"--model_dir={run}")
    assert scored.status == 0, scored.err
    rows = read_jsonl(run / "scores.jsonl")
    assert {row["chapter"] for row in rows if row["system"] == "moe"} == {2}
    assert {row["direction"] for row in rows} >= {"en-el", "el-en"}

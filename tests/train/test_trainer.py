"""The trainer: exact resume, what is written, early stopping, interruption, refusals."""

import functools
import os
import shutil
import signal
from typing import Any

import jax
import numpy as np
import pytest

from m4.data.stream.stream import Stream
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.model.gates.deepseek import deepseek
from m4.settings import InputError
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import complete_steps, latest_step
from m4.train.average import averaged
from m4.train.early_stopping import EarlyStopping
from m4.train.loop import Evaluator, Interrupted
from m4.train.multitask.groups import by_language
from m4.train.multitask.surgery import GradientVaccine
from m4.train.optimizer import adamw
from tests.shared import SMALL_MOE, model_for
from tests.train.test_step import mesh_of
from tests.train.trainers import timeless_rows, train


@pytest.fixture(scope="module")
def run(corpus):
    """Runs train() on one device, with defaults for what a test does not change."""
    stream = Stream(corpus, seed=1, batch_rows=4)
    model = model_for(corpus, dropout_rate=0.1)
    return functools.partial(
        train, model=model, stream=stream, optimizer=adamw, mesh=mesh_of(1, 1), log_period=2,
        note={"vocabulary": corpus.vocabulary.fingerprint}, groups={"low": stream.directions},
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_steps(run, tmp_path_factory):
    """Returns the read-only folder of a run of two steps; `copied` may be resumed."""
    folder = tmp_path_factory.mktemp("two") / "steps"
    run(folder, total_steps=2)
    return folder


@pytest.fixture
def copied(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "copied")


@pytest.fixture(scope="module")
def four_steps(run, two_steps, tmp_path_factory):
    """Returns the read-only folder after two more steps, and what they trained."""
    folder = shutil.copytree(two_steps, tmp_path_factory.mktemp("four") / "steps")
    return folder, run(folder, total_steps=4)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


BIASED = functools.partial(SMALL_MOE, gate=functools.partial(deepseek, bias_rate=0.01))
AVERAGED = functools.partial(averaged, optimizer=adamw)
GROUPS = {"gradients": GradientVaccine(by_language, beta=0.3), "learning_rates": {"gl": 2.0}}
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Experts change at the fourth step, by gradients from before and after the interruption.
    "slow experts": ({}, {"optimizer": functools.partial(adamw, experts_every=4)}),
    "averages and groups": ({"moe": None}, {"optimizer": AVERAGED, **GROUPS}),
    "biases of a gate": ({"moe": BIASED}, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param("slow experts", marks=pytest.mark.thorough), *list(RESUMED)[1:]]
)
def test_resume_is_bit_equal(tmp_path, run, corpus, name):
    """The optimizer has no cooldown, which would know where a run ends.

    Who reads the checkpoint finds the parameters, or their averages, that training has at its end.
    """
    changes, settings = RESUMED[name]
    model = model_for(corpus, dropout_rate=0.1, **changes)
    run = functools.partial(run, model=model, **settings)
    whole = run(tmp_path / "whole", total_steps=6, checkpoint_period=3)
    # As if it had been killed after its first checkpoint.
    parts = shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(parts / "checkpoints" / "6")
    log = parts / "metrics.jsonl"
    assert log.read_text().count('"step": 4') == 1
    log.write_text(log.read_text().replace('"step": 4', '"step": 4, "loss_before": 1.0'))
    resumed = run(parts, total_steps=6, checkpoint_period=3)
    read, step, _ = restore_params(model, parts / "checkpoints")
    assert step == 6
    for found in (resumed.params, read):
        jax.tree.map(np.testing.assert_array_equal, whole.params, found)
    assert timeless_rows(parts) == timeless_rows(tmp_path / "whole")


def test_groups_of_directions_are_those_of_the_whole_run(copied, run):
    with pytest.raises(InputError, match="was trained with another gradient method"):
        run(copied, total_steps=4, **GROUPS)


def test_a_damaged_last_checkpoint_is_moved_aside_and_its_steps_taken_again(
    four_steps, tmp_path, run, capfd
):
    folder, whole = four_steps
    copied = shutil.copytree(folder, tmp_path / "copied")
    damaged = next((copied / "checkpoints" / "4" / "optimizer").rglob("ocdbt.process_0/d/*"))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    again = run(copied, total_steps=4)
    assert "checkpoints/4: damaged (optimizer/ocdbt.process_0/d/" in capfd.readouterr().err
    assert {"2", "4", "4.damaged"} <= {path.name for path in (copied / "checkpoints").iterdir()}
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
    assert [row["step"] for row in read_metrics(copied)] == [2, 4]


def test_a_row_has_losses_speed_and_the_experts_metrics(two_steps):
    (row,) = read_metrics(two_steps)
    assert row["step"] == 2
    assert {"loss", "nll", "nll/en-gl", "nll/gl-en", "nll/low", "gradient_norm"} <= row.keys()
    assert {"tokens_per_second", "auxiliary_loss", "first_overflow"} <= row.keys()
    assert {f"load/{e}" for e in range(4)} <= row.keys()
    # Shares of the first choices over the experts.
    np.testing.assert_allclose(sum(row[f"load/{e}"] for e in range(4)), 1.0, rtol=1e-5)


def test_rows_after_the_checkpoint_are_removed_on_resume(copied, run):
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "nll": 1.0}\n{"step": 6, "nl')  # killed in the middle of a line
    run(copied, total_steps=4)
    assert [row["step"] for row in read_metrics(copied)] == [2, 4]
    assert read_metrics(copied)[-1]["nll"] != 1.0


def test_early_stopping_keeps_the_best(tmp_path, run):
    scores = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    seen = []

    def evaluate(params):
        seen.append(leaves(params))
        return {"dev/chrf": next(scores), "dev/nll": 2.0 * len(seen)}

    trained = run(
        tmp_path, total_steps=50, evaluators=[Evaluator(1, evaluate)], checkpoint_period=1,
        early_stopping=EarlyStopping("dev/chrf", patience=2), dev_period=1, keep_checkpoints=1,
        keep_best=1,
    )  # fmt: skip
    # 3.0 at step 2 is not beaten at steps 3 and 4: stopped there.
    assert len(seen) == 4
    assert trained.note["best_step"] == 2
    read, _, _ = restore_params(run.keywords["model"], tmp_path / "checkpoints")  # to decode
    for a, b, c in zip(leaves(trained.params), leaves(read), seen[1], strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    # dev/nll was lowest at step 1. Where training stops early, at a checkpoint's step too, it says
    # that it has finished: who follows it waits for no more.
    assert complete_steps(tmp_path / "checkpoints") == [1, 4]
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as store:
        assert [store.note(step).get("finished") for step in (1, 4)] == [None, True]


def test_early_stopping_survives_an_interruption(tmp_path, run):
    def scores_from(values):
        remaining = iter(values)
        return [Evaluator(1, lambda params: {"dev/chrf": next(remaining)})]

    rule = EarlyStopping("dev/chrf", patience=2)
    first = run(tmp_path, total_steps=2, evaluators=scores_from([3.0, 2.0]), early_stopping=rule)
    resumed = run(tmp_path, total_steps=50, evaluators=scores_from([1.0, 9.0]), early_stopping=rule)
    # One evaluation without a rise before, one after: stopped at step 3 with step 1's parameters.
    assert resumed.note["step"] == 3
    assert resumed.note["best_step"] == 1
    jax.tree.map(np.testing.assert_array_equal, first.params, resumed.params)


def test_averages_are_what_is_evaluated_and_used(tmp_path, run, four_steps):
    seen = []
    evaluators = [Evaluator(4, lambda params: seen.append(leaves(params)) or {})]
    trained = run(tmp_path, total_steps=4, optimizer=AVERAGED, evaluators=evaluators)
    for a, b in zip(leaves(trained.params), *seen, strict=True):
        np.testing.assert_array_equal(a, b)
    # Not the steps' own parameters: the first adamw steps move all by about the rate.
    assert not np.array_equal(leaves(four_steps[1].params)[0], leaves(trained.params)[0])


def test_ctrl_c_saves_the_step(tmp_path, run):
    def ask(params):
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    with pytest.raises(Interrupted, match=r"step 3 \(saved\)"):
        run(tmp_path, total_steps=50, evaluators=[Evaluator(3, ask)])
    assert latest_step(tmp_path / "checkpoints") == 3
    assert run(tmp_path, total_steps=4).note["step"] == 4


@pytest.mark.parametrize("what", ["vocabulary", "stream"])
def test_another_vocabulary_or_stream_is_refused(copied, run, corpus, what):
    changed = (
        {"note": {"vocabulary": "other"}}
        if what == "vocabulary"
        else {"stream": Stream(corpus, seed=2, batch_rows=4)}
    )
    with pytest.raises(ValueError, match=rf"another {what}.*--fresh"):
        run(copied, total_steps=3, **changed)
    assert latest_step(copied / "checkpoints") == 2


def test_what_does_not_divide_is_refused_before_anything_is_written(tmp_path, run):
    """Meshes: tests/cli/test_main.py; stages: tests/model/test_pipeline.py."""
    message = (
        "^Training.batch_size = 4: must be a multiple of 3: Training.grad_accum_steps = 3 "
        "parts on each of 1 devices with different rows; nearest valid sizes: 3 and 6$"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "none", total_steps=1, grad_accum_steps=3)
    assert not (tmp_path / "none").exists()

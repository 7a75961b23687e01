"""Bad steps: judged in the step, then training stops, skips them, or goes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m4 import config
from m4.data.corpus import CorpusSpec
from m4.data.stream.stream import Stream
from m4.storage.checkpoints import Checkpoints
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from m4.train.bad_steps import BAD, RECENT, BadStep, BadSteps, guarded, z_scores
from m4.train.loop.guard import StepGuard, read_bad_steps
from m4.train.state import TrainState
from m4.train.trainer import Trained
from tests.data.corpus import Made
from tests.train.test_step import SHALLOW, mesh_of
from tests.train.trainers import timeless_rows, train, training_of

DEMO = Path(__file__).parents[3] / "gin_configs" / "demo.gin"
Run = Callable[..., Trained]
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


class Poisoned(Stream):
    """A stream with bad batches: step -> what its loss weights are multiplied by."""

    bad: Mapping[int, Any] = {}
    ends_at: int | None = None  # an error, as a killed process

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
        if step + 1 == self.ends_at:
            raise OSError("killed")
        made = super().batch(step, part)
        if (factor := self.bad.get(step + 1)) is not None:
            made["decoder_loss_weights"] = made["decoder_loss_weights"] * np.float32(factor)
        return made


# Weights that sum up to nearly nothing, so that the loss, which is divided by it, is huge.
def spike(length: int) -> np.ndarray:
    return np.where(np.arange(length) % 2, -1000.0, 1000.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    corpus = CorpusSpec(
        Made({"gl": 60}), vocabulary_size=300, lengths={"inputs": 64, "targets": 64}
    ).build(tmp_path_factory.mktemp("corpus") / "data")
    model = SHALLOW.clone(
        vocab_size=-(-corpus.source_vocabulary.size // 8) * 8,
        directions=2,
        dropout_rate=0.1,
        moe=None,
    )

    def run(
        folder: Path, bad: Mapping[int, Any], ends_at: int | None = None, **settings: Any
    ) -> Trained:
        stream = Poisoned(corpus, seed=1, batch_rows=4)
        stream.bad, stream.ends_at = bad, ends_at
        settings = {"total_steps": 10, "log_period": 2, "checkpoint_period": 4, **settings}
        return train(folder, model, stream, mesh_of(1, 1), **settings)

    return run


def assert_equal(a: Trained, b: Trained) -> None:
    for one, other in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_array_equal(one, other)


# Step 3 comes before the window is full: it is none of the bad steps.
BAD_STEPS = {3: spike(64), 5: math.nan, 9: spike(64)}
RULE = BadSteps(spike_threshold=50, window=4)


@pytest.fixture(scope="module")
def skipped(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    folder = tmp_path_factory.mktemp("skipped")
    return folder, run(folder, BAD_STEPS, on_bad_step="skip", bad_steps=RULE)


def test_a_skipped_step_is_counted_and_noted(skipped: tuple[Path, Trained]) -> None:
    folder, trained = skipped
    rows = read_metrics(folder)
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 2]
    assert all(0 < row["loss"] < 10 for row in rows[2:])
    nan, spiked = trained.note["bad_steps"]
    assert nan == {"step": 5, "what": "loss is nan", "action": "skip"}
    assert spiked["step"] == 9
    assert "robust standard deviations above the median of 4 steps" in spiked["what"]
    assert read_bad_steps(folder) == [nan, spiked]
    assert len(trained.note["recent"]) == 4
    assert latest_step(folder / "checkpoints") == trained.note["step"] == 10


@pytest.mark.thorough
def test_a_killed_run_skips_the_same_steps(
    skipped: tuple[Path, Trained], run: Run, tmp_path: Path
) -> None:
    """Killed at step 6, after the skipped one and before the next checkpoint."""
    folder, trained = skipped
    settings = {"on_bad_step": "skip", "bad_steps": RULE}
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, BAD_STEPS, ends_at=6, **settings)
    assert_equal(run(tmp_path, BAD_STEPS, **settings), trained)
    assert timeless_rows(tmp_path) == timeless_rows(folder)


def test_to_go_back_and_leave_a_batch_out_is_to_skip_it(
    skipped: tuple[Path, Trained], run: Run, tmp_path: Path
) -> None:
    trained = run(tmp_path, BAD_STEPS, on_bad_step="rewind", bad_steps=RULE)
    assert_equal(trained, skipped[1])
    assert [one["left_out"] for one in trained.note["bad_steps"]] == [[5], [9]]


@pytest.mark.thorough
def test_it_goes_back_to_no_damaged_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Step 8's is damaged once it is written; step 9 is bad."""
    whole = run(tmp_path / "whole", {9: math.nan}, on_bad_step="rewind")
    folder, wait = tmp_path / "damaged" / "checkpoints", Checkpoints.wait

    def damaged(checkpoints: Checkpoints) -> None:
        wait(checkpoints)
        if latest_step(folder) == 8 and not list(folder.glob("8.damaged")):
            array = next((folder / "8" / "params").rglob("ocdbt.process_0/d/*"))
            array.write_bytes(array.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(Checkpoints, "wait", damaged)
    assert_equal(run(tmp_path / "damaged", {9: math.nan}, on_bad_step="rewind"), whole)
    assert "8: damaged (params/" in (said := capfd.readouterr().err)
    assert "8.damaged; step 4 is used" in said
    assert timeless_rows(tmp_path / "damaged") == timeless_rows(tmp_path / "whole")


@pytest.mark.thorough
def test_after_going_back_a_killed_run_leaves_out_the_same_batches(
    run: Run, tmp_path: Path
) -> None:
    """Step 6 is bad, the checkpoint before it is of step 4: 5 and 6 of three are left out."""
    settings = {"on_bad_step": "rewind", "bad_steps": BadSteps(leave_out=3)}
    whole = run(tmp_path / "whole", {6: math.nan}, **settings)
    assert whole.note["bad_steps"][0]["left_out"] == [5, 6]
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "killed", {6: math.nan}, ends_at=8, **settings)
    # It does not look at the batch again, which would be sound now.
    resumed = run(tmp_path / "killed", {}, **settings)
    assert_equal(resumed, whole)
    assert timeless_rows(tmp_path / "killed") == timeless_rows(tmp_path / "whole")


def test_a_run_ends_at_a_bad_step_and_its_last_checkpoint_is_good(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(BadStep, match=r"^step 5: loss is nan; ") as raised:
        run(tmp_path, {5: math.nan})
    assert f"m4 explain {tmp_path} --step=5" in str(raised.value)
    assert "rsqrt.peak" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert latest_step(tmp_path / "checkpoints") == 4
    assert read_bad_steps(tmp_path)[0]["action"] == "stop"


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    training = training_of(on_bad_step="skip", bad_steps=BadSteps(most_in_a_row=2))
    guard = StepGuard(training, tmp_path, {}, 0, HERE)
    for step in (2, 4, 5):
        bad = {"bad": step != 3, "z": np.zeros(2)}
        guard.add(step, {"loss": math.nan, "gradient_norm": 1.0, BAD: bad, RECENT: None})
        if step < 5:
            assert guard.check() == [step]
    with pytest.raises(BadStep, match=r"^2 bad steps in a row \(BadSteps.most_in_a_row\): step 5"):
        guard.check()


def test_the_default_step_is_the_one_without_a_guard(tmp_path: Path) -> None:
    guard = StepGuard(training_of(), tmp_path, {}, 0, HERE)
    step = object()
    assert guard.wrap(step) is step
    assert (guard.inputs(), guard.note(3), guard.row(3)) == ({}, {}, {})


def test_a_bad_step_changes_neither_parameters_nor_optimizer() -> None:
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones(3)}

    def step(state: TrainState, batch: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        gradients = {"w": batch["x"] * jnp.ones(3)}
        updates, kept = optimizer.update(gradients, state.optimizer, state.params)
        new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), kept)
        return new, {"loss": batch["x"], "gradient_norm": optax.tree.norm(gradients)}

    run = jax.jit(guarded(step, BadSteps(spike_threshold=5, window=4)))
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    recent = jnp.full((4, 2), jnp.nan)
    for x in (1.0, 1.1, 0.9, 1.0, math.inf, 1.0, 100.0, 1.1):
        before = state
        state, metrics = run(state, {"x": jnp.asarray(x), RECENT: recent})
        recent = metrics[RECENT]
        bad = not x < 50
        assert bool(metrics[BAD]["bad"]) == bad
        same = [bool(jnp.all(a == b)) for a, b in zip(
            jax.tree.leaves((before.params, before.optimizer)),
            jax.tree.leaves((state.params, state.optimizer)), strict=True)]  # fmt: skip
        assert all(same) if bad else not any(same)
        assert state.step == before.step + 1
    np.testing.assert_allclose(recent[:, 0], [0.9, 1.0, 1.0, 1.1])


def test_z_scores_by_hand() -> None:
    """Median 3, absolute deviations 2 1 0 1 97, MAD 1: z = (5 - 3) / 1.4826; and constant values,
    of which a thousandth counts as one deviation."""
    recent = jnp.array([[1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [4.0, 7.0], [100.0, 7.0]])
    found = z_scores(jnp.array([5.0, 7.7]), recent)
    np.testing.assert_allclose(found, [2 / 1.4826, 0.7 / 0.007], rtol=1e-5)


def test_their_settings_are_a_part_that_needs_no_reference() -> None:
    name = "experiment.BadSteps.spike_threshold"
    made = config.load([DEMO], [f"{name} = 12", "experiment.Training.on_bad_step = 'rewind'"])
    assert made.experiment().training.bad_steps == BadSteps(spike_threshold=12)
    for binding in (f"{name} = 0", "experiment.BadSteps.spikes_of = ('nll',)"):
        with pytest.raises(config.ConfigError, match=r"must be .*(above 0|one of loss)"):
            config.load([DEMO], [binding]).experiment()


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad_steps.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"bad_steps.json: damaged"):
        read_bad_steps(tmp_path)

"""Bad steps: judged in the step, then training skips them or ends."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m4.data.cache.cache import Cache
from m4.data.stream.stream import Stream
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from m4.train.bad_steps import BAD, RECENT, BadStep, BadSteps, StepGuard, guarded, z_scores
from m4.train.loop import Trained
from m4.train.step import TrainState
from tests.shared import model_for
from tests.train.test_step import mesh_of
from tests.train.trainers import timeless_rows, train

Run = Callable[..., Trained]
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


class Poisoned(Stream):
    """Stream with bad batches, given step -> factor of the loss weights."""

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
def run(corpus: Cache) -> Run:
    model = model_for(corpus, directions=4, dropout_rate=0.1, moe=None)

    def run(
        folder: Path, bad: Mapping[int, Any], ends_at: int | None = None, **settings: Any
    ) -> Trained:
        stream = Poisoned(corpus, seed=1, batch_rows=4)
        stream.bad, stream.ends_at = bad, ends_at
        settings = {"total_steps": 10, "log_period": 2, "checkpoint_period": 4, **settings}
        return train(folder, model, stream, mesh_of(1, 1), **settings)

    return run


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
    assert nan == {"step": 5, "what": "loss is nan"}
    assert spiked["step"] == 9
    assert "robust standard deviations above the median of 4 steps" in spiked["what"]
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
    again = run(tmp_path, BAD_STEPS, **settings)
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    assert timeless_rows(tmp_path) == timeless_rows(folder)


def test_a_run_ends_at_a_bad_step_and_its_last_checkpoint_is_good(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BadStep, match=r"^step 5: loss is nan; ") as raised:
        run(tmp_path, {5: math.nan})
    assert "data batch with --step=5" in str(raised.value)
    assert "rsqrt.peak" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert latest_step(tmp_path / "checkpoints") == 4


def test_too_many_bad_steps_in_a_row_end_the_run() -> None:
    guard = StepGuard("skip", BadSteps(most_in_a_row=2), {}, HERE)
    for step in (2, 4, 5):
        bad = {"bad": step != 3, "z": np.zeros(2)}
        guard.add(step, {"loss": math.nan, "gradient_norm": 1.0, BAD: bad, RECENT: None})
        if step < 5:
            assert guard.check() == [step]
    with pytest.raises(BadStep, match=r"^2 bad steps in a row \(BadSteps.most_in_a_row\): step 5"):
        guard.check()


def test_the_default_step_is_the_one_without_a_guard() -> None:
    guard = StepGuard("stop", BadSteps(), {}, HERE)
    step = object()
    assert guard.wrap(step) is step
    assert (guard.inputs(), guard.note(), guard.row(3)) == ({}, {}, {})


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
    """Median 3, absolute deviations 2 1 0 1 97, MAD 1: z = (5 - 3) / 1.4826.

    A thousandth of constant values counts as one deviation.
    """
    recent = jnp.array([[1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [4.0, 7.0], [100.0, 7.0]])
    found = z_scores(jnp.array([5.0, 7.7]), recent)
    np.testing.assert_allclose(found, [2 / 1.4826, 0.7 / 0.007], rtol=1e-5)

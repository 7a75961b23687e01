"""Choices by layer, direction and expert equal a recount of every plan."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from m4.data.cache import cache as caches
from m4.data.stream.stream import Stream
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.routing import Routing
from m4.parallel.layout import to_global
from m4.storage.metrics_log import read_metrics
from m4.train.optimizer import adamw
from tests.shared import SMALL_MOE, model_for
from tests.train.test_step import SHALLOW, a_batch, mesh_of
from tests.train.trainers import program_of, train

DIRECTIONS = 3
LAYERS = ("encoder_0", "decoder_0")


def a_batch_of_directions() -> dict[str, np.ndarray]:
    """Packed rows: the two halves are of different directions; 0 in padding."""
    batch = a_batch()
    rows, length = batch["encoder_input_tokens"].shape
    ids = (np.arange(rows)[:, None] + 2 * np.arange(length)[None] // length) % DIRECTIONS
    batch["encoder_input_tokens"][:, -1] = 0
    batch["encoder_direction_ids"] = np.where(
        batch["encoder_input_tokens"] > 0, ids, 0
    ).astype(np.int32)  # fmt: skip
    batch["direction_ids"] = np.where(batch["decoder_target_tokens"] > 0, ids, 0).astype(np.int32)
    return batch


@functools.cache
def one_step(mesh: Any, **options: Any) -> dict[str, Any]:
    model, optimizer, batch = SHALLOW.clone(**options), adamw(10), a_batch_of_directions()
    program = program_of(model, mesh, optimizer, DIRECTIONS)
    with program.axis_rules():
        return jax.device_get(program.jit()(program.new_state(), to_global(mesh, batch))[1])


def test_counts_equal_a_recount_of_the_plans() -> None:
    plans: list[tuple[np.ndarray, np.ndarray]] = []

    def seen_gate(tokens: Any, num_experts: int, capacity: Any) -> Routing:
        routing = top2_gshard(tokens, num_experts, capacity)
        if tokens.train:
            assert tokens.step is not None
            jax.debug.callback(
                lambda *x: plans.append((np.asarray(x[0]), np.asarray(x[1]))),
                routing.expert_GSK,
                routing.position_GSK,
                ordered=True,
            )
        return routing

    # A small capacity, so that some choices find no slot: 2 * 8 * .25 / 4 = 1, raised to 4.
    moe = functools.partial(SMALL_MOE, gate=seen_gate, train_capacity_factor=0.25)
    metrics = one_step(mesh_of(1, 1), directions=DIRECTIONS, moe=moe)
    jax.effects_barrier()
    batch = a_batch_of_directions()
    sides = {"encoder_0": "encoder_direction_ids", "decoder_0": "direction_ids"}
    assert list(metrics["expert_loads"]) == ["decoder_0", "encoder_0"]
    assert len(plans) == 2  # the encoder's runs first
    dropped = 0
    for (layer, name), (expert_GSK, position_GSK) in zip(sides.items(), plans, strict=True):
        wanted = np.zeros((DIRECTIONS, 4), np.int64)
        direction_GS = batch[name].reshape(expert_GSK.shape[:2])
        for g, s, k in np.ndindex(*expert_GSK.shape):
            if position_GSK[g, s, k] >= 0:
                wanted[direction_GS[g, s], expert_GSK[g, s, k]] += 1
        np.testing.assert_array_equal(metrics["expert_loads"][layer], wanted)
        assert (wanted.sum(axis=1) > 0).all()
        dropped += (position_GSK[..., 0] < 0).sum()
        # The assigned choices are the load, and T5X's usage.
        load_E = wanted.sum(axis=0) / wanted.sum()
        np.testing.assert_allclose(metrics["layers"][layer]["load_E"], load_E, rtol=1e-6)
    assert dropped > 2 * 8  # more than the padding of both sides


@pytest.mark.thorough
def test_counting_changes_nothing_else() -> None:
    with_counts = one_step(mesh_of(1, 1), directions=DIRECTIONS)
    without = one_step(mesh_of(1, 1))
    assert without["expert_loads"] == {}
    with_counts, without = ({**x, "expert_loads": {}} for x in (with_counts, without))
    jax.tree.map(np.testing.assert_array_equal, with_counts, without)


def test_counts_on_eight_devices_are_those_on_one() -> None:
    one = one_step(mesh_of(1, 1), directions=DIRECTIONS)["expert_loads"]
    eight = one_step(mesh_of(2, 4), directions=DIRECTIONS)["expert_loads"]
    jax.tree.map(np.testing.assert_array_equal, one, eight)


def test_a_row_and_the_counts_have_every_layer(tmp_path: Path, corpus: caches.Cache) -> None:
    stream = Stream(corpus, seed=1, batch_rows=4)
    note = {"train_pairs": {"gl": 60, "de": 120}}
    model = model_for(corpus, directions=4)
    train(tmp_path, model, stream, mesh_of(1, 1), total_steps=5, note=note, log_period=2)
    saved = json.loads((tmp_path / "atlas.train.json").read_text("utf-8"))
    assert (saved["steps"], saved["directions"]) == ([0, 5], stream.directions)
    assert saved["train_pairs"] == note["train_pairs"]
    for layer in LAYERS:
        name = layer.replace("_0", "_segment_ids")
        tokens = sum(int((stream.batch(step)[name] > 0).sum()) for step in range(5))
        assigned_DE = np.array(saved["layers"][layer])
        assert assigned_DE.shape == (4, 4)
        # At most two choices a real token.
        assert 0.5 * tokens < assigned_DE.sum() <= 2 * tokens
    row = read_metrics(tmp_path)[0]
    assert row["step"] == 2
    names = ["dead_experts", "first_overflow", "second_overflow", "router_entropy"]
    names += ["router_confidence", "auxiliary_loss", "router_z_loss"]
    for name in [*(f"load/{e}" for e in range(4)), *names]:
        # Six digits of each, so their mean is right to about as many.
        mean = np.mean([row[f"moe/{layer}/{name}"] for layer in LAYERS])
        np.testing.assert_allclose(row[name], mean, rtol=2e-5, atol=1e-7, err_msg=name)
    for layer in LAYERS:
        load = [row[f"moe/{layer}/load/{e}"] for e in range(4)]
        np.testing.assert_allclose(sum(load), 1.0, rtol=1e-4)
    # Counts are no metric.
    assert not [name for name in row if "expert_loads" in name]

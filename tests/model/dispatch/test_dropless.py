"""Dropless dispatch: rows without neighbours, the exchange over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.dispatch import row_exchange
from m4.model.dispatch.dropless import dropless, rows_of_block
from m4.model.feed_forward import Experts
from tests.model.dispatch.shared import (
    SETTINGS,
    Setting,
    assert_right,
    everyone_to,
    numbers,
    on,
    plan,
    random_plan,
)

ONLY = {"dropless": dropless}


@pytest.mark.parametrize(("experts", "expert", "choices"), [(4, 3, 2), (1, 0, 1)])
def test_one_expert_takes_all(experts, expert, choices):
    setting = Setting(None, 2, 8, experts, 8, choices)
    assert_right(setting, everyone_to(expert, setting), 0, ONLY)


@pytest.mark.parametrize(
    ("tokens", "mesh"), [(16, None), (256, None), (64, {"data": 2, "expert": 4})]
)
def test_a_row_does_not_know_its_neighbours(tokens, mesh):
    # Token 0 has the same experts in every plan; who else is there, and where, changes.
    M, F, E, K = 64, 96, 8, 2
    groups = 8 if mesh else 1
    rng = np.random.default_rng(0)
    experts = Experts(
        (jnp.asarray(rng.normal(size=(E, M, F)), jnp.float32),),
        jnp.asarray(rng.normal(size=(E, F, M)), jnp.float32),
    )
    run = jax.jit(dropless)
    x_M = rng.normal(size=M).astype(np.float32)
    found = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x_GSM = rng.normal(size=(groups, tokens, M)).astype(np.float32)
        expert_GSK = np.argsort(rng.random((groups, tokens, E)), axis=-1)[..., :K].astype(np.int32)
        place = int(rng.integers(tokens))
        x_GSM[0, place], expert_GSK[0, place] = x_M, (2, 5)
        weight_GSK = rng.random((groups, tokens, K)).astype(np.float32)
        weight_GSK[0, place] = (0.75, 0.25)
        slot_GSK = np.broadcast_to(np.arange(tokens)[None, :, None], expert_GSK.shape)
        routing = plan(expert_GSK, slot_GSK, weight_GSK, E, tokens)
        with on(mesh):
            found.add(np.asarray(run(x_GSM, routing, experts))[0, place].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("choices", "experts", "rows"),
    # An expert's rows when balanced, of more than 16 half, a power of 2, from 4 to 128.
    [(32, 8, 8), (64, 8, 8), (128, 8, 16), (256, 8, 16), (512, 8, 32), (2048, 8, 128), (128, 64, 4),
     (1, 64, 4), (10**6, 8, 128)],
)  # fmt: skip
def test_rows_of_a_block(choices, experts, rows):
    assert rows_of_block(choices, experts) == rows


@pytest.mark.parametrize("devices", [2, 4])
def test_rows_travel_over_fewer_devices(devices):
    mesh = {"expert": devices, "devices": jax.devices()[:devices]}
    setting = Setting(mesh, 4, 8, 4, 8, 2)
    assert_right(setting, random_plan(0, *setting[1:]), 0, ONLY)
    assert_right(setting, everyone_to(3, setting), 0, ONLY)


def test_as_many_rounds_as_there_are_rows(monkeypatch):
    # A device may send one row a round to another; one expert takes all, so that 8 are needed.
    monkeypatch.setattr(row_exchange, "_FEWEST", 1)
    monkeypatch.setattr(row_exchange, "_SPARE", 0)
    setting = SETTINGS["data 2 x expert 4"]._replace(K=2)
    for routing in (everyone_to(3, setting), random_plan(1, *setting[1:])):
        assert_right(setting, routing, 0, ONLY)
    x_GSM, _, experts = numbers(0, setting)
    with on(setting.mesh):
        text = jax.jit(dropless).lower(x_GSM, routing, experts).compile().as_text() or ""
    assert f'{row_exchange.ROUNDS}/while"' in text  # plans know the loop by its name


def test_rows_of_a_round():
    # Twice those of a balanced routing: 2 * 4096 / 8 for each of 8 owners; at least 512 in all; no
    # more than there can be.
    assert row_exchange.rows_a_round(4096, 8, 4096) == 1024
    assert row_exchange.rows_a_round(64, 8, 64) == 64
    assert row_exchange.rows_a_round(8, 64, 8) == 8
    assert row_exchange.rows_a_round(64, 64, 64) == 8


def test_counts_then_rows_in_bfloat16_and_no_weights():
    setting = Setting({"data": 2, "expert": 4}, 8, 256, 4, 256, 2)
    x_GSM, _, experts = numbers(0, setting)
    experts = jax.tree.map(lambda x: x.astype(jnp.bfloat16), experts)
    routing = everyone_to(1, setting)
    with on(setting.mesh):
        lowered = jax.jit(dropless).lower(x_GSM.astype(jnp.bfloat16), routing, experts)
        text = lowered.as_text()
        compiled = lowered.compile().as_text() or ""
    types = [
        line.rsplit("-> ", 1)[1] for line in text.splitlines() if '"stablehlo.all_to_all"' in line
    ]
    # Where rows begin, and counts by expert and group; then rows there and back: 4 owners, 256 of
    # the device's 512 rows to each at most in a round.
    assert sorted(types) == sorted(
        ["tensor<4x2xi32>", "tensor<1024x6xbf16>", "tensor<1024x6xbf16>"]
    )
    assert "all-gather" not in compiled

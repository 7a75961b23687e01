"""Rows over a mesh: any number of rounds, what travels and what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.dispatch import row_exchange
from m4.model.dispatch.dropless import dropless
from tests.model.dispatch.shared import (
    SETTINGS,
    Setting,
    assert_right,
    numbers,
    on,
    plan,
    random_plan,
)

ONLY = {"dropless": dropless}


def everyone_to(expert: int, setting: Setting):
    """Each token's only slot is at one expert."""
    _, G, S, E, C, K = setting
    slot_GSK = np.full((G, S, K), -1)
    slot_GSK[..., 0] = np.arange(S)[None]
    return plan(np.full((G, S, K), expert), slot_GSK, np.ones((G, S, K), np.float32), E, C)


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

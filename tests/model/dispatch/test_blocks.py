"""Blocks: where rows lie, how many blocks there are, rows that do not know their neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.dispatch import blocks as module
from m4.model.dispatch.blocks import block_product, blocks, blocks_of, rows_of_block
from m4.model.experts import Experts
from tests.model.dispatch.shared import Setting, check, close, plan, random_plan

ONLY = {"blocks": blocks}


def test_blocks_by_hand():
    # G = 1, S = 5, K = 1, E = 3, C = 5, blocks of 2 rows. Expert 0 has tokens 0, 2, 3 (in this
    # order of slots: 3, 0, 2), expert 1 none, expert 2 has token 4; token 1 has no slot.
    expert_GSK = np.array([[[0], [0], [0], [0], [2]]])
    position_GSK = np.array([[[1], [-1], [2], [0], [0]]])
    found = jax.jit(blocks_of, static_argnums=(2, 3, 4))(expert_GSK, position_GSK, 3, 5, 2)
    # At most ceil(5 / 2) + 3 blocks; 2 of expert 0 and 1 of expert 2 are there.
    assert found.count == 3
    assert found.expert_N.tolist() == [0, 0, 2, 3, 3, 3]
    assert found.slots.owner_GP.tolist() == [[3, 0, 2, 5, 4, 5, 5, 5, 5, 5, 5, 5]]
    assert found.slots.slot_GJ.tolist() == [[1, 12, 2, 0, 4]]


def everyone_to(expert: int, setting: Setting):
    """Each token's only slot is at one expert."""
    _, G, S, E, C, K = setting
    slot_GSK = np.full((G, S, K), -1)
    slot_GSK[..., 0] = np.arange(S)[None]
    weight_GSK = np.ones((G, S, K), np.float32)
    return plan(np.full((G, S, K), expert), slot_GSK, weight_GSK, E, C)


def test_one_expert_takes_all():
    setting = Setting(None, 2, 8, 4, 8, 2)
    check(setting, everyone_to(3, setting), 0, ONLY)


def test_a_single_expert():
    setting = Setting(None, 2, 8, 1, 8, 1)
    check(setting, everyone_to(0, setting), 0, ONLY)


def test_every_expert_for_every_token():
    setting = Setting(None, 2, 8, 4, 8, 4)
    slot_GSK = np.broadcast_to(np.arange(8)[None, :, None], (2, 8, 4))
    expert_GSK = np.broadcast_to(np.arange(4)[None, None], (2, 8, 4))
    weight_GSK = np.random.default_rng(0).random((2, 8, 4)).astype(np.float32)
    check(setting, plan(expert_GSK, slot_GSK, weight_GSK, 4, 8), 0, ONLY)


@pytest.mark.parametrize("tokens", [16, 256])
def test_a_row_does_not_know_its_neighbours(tokens):
    # Token 0 has the same experts in every plan; who else is there, and where, changes.
    M, F, E, K = 64, 96, 8, 2
    rng = np.random.default_rng(0)
    experts = Experts(
        (jnp.asarray(rng.normal(size=(E, M, F)), jnp.float32),),
        jnp.asarray(rng.normal(size=(E, F, M)), jnp.float32),
    )
    run = jax.jit(blocks)
    x_M = rng.normal(size=M).astype(np.float32)
    found = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x_GSM = rng.normal(size=(1, tokens, M)).astype(np.float32)
        expert_GSK = np.argsort(rng.random((1, tokens, E)), axis=-1)[..., :K].astype(np.int32)
        place = int(rng.integers(tokens))
        x_GSM[0, place], expert_GSK[0, place] = x_M, (2, 5)
        weight_GSK = rng.random((1, tokens, K)).astype(np.float32)
        weight_GSK[0, place] = (0.75, 0.25)
        slot_GSK = np.broadcast_to(np.arange(tokens)[None, :, None], expert_GSK.shape)
        routing = plan(expert_GSK, slot_GSK, weight_GSK, E, tokens)
        found.add(np.asarray(run(x_GSM, routing, experts))[0, place].tobytes())
    assert len(found) == 1


def test_blocks_that_are_not_there_are_not_multiplied():
    # Were they multiplied, the NaN of their rows would be seen.
    x_NbM = jnp.full((4, 2, 3), jnp.nan).at[:2].set(1.0)
    w_EMF = jnp.ones((2, 3, 5))
    y_NbF = jax.jit(block_product)(x_NbM, w_EMF, jnp.array([0, 1, 2, 2]), jnp.array(2))
    # 1 * 1 three times.
    assert np.asarray(y_NbF)[:2].tolist() == [[[3.0] * 5] * 2] * 2
    assert not np.asarray(y_NbF)[2:].any()


def test_the_product_of_accelerators_is_that_of_cpus():
    # lax.ragged_dot runs on a CPU too, so what other platforms compute is compared here.
    rng = np.random.default_rng(0)
    x_NbM, w_EMF = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 4, 6), (3, 6, 7)))
    d_NbF = jnp.asarray(rng.normal(size=(5, 4, 7)), jnp.float32)
    expert_N, count = jnp.array([0, 2, 2, 3, 3]), jnp.array(3)
    arguments = (x_NbM, w_EMF, expert_N, count)
    close(module._grouped(*arguments), module._loop(*arguments), "product")
    for grouped, loop in zip(
        module._grouped_backward(*arguments, d_NbF),
        module._loop_backward(*arguments, d_NbF),
        strict=True,
    ):
        close(grouped, loop, "gradient")


def test_rows_of_a_block():
    # Half of an expert's rows when balanced, a power of 2, from 4 to 128.
    for choices, experts, rows in ((32, 8, 4), (128, 8, 8), (512, 8, 32), (2048, 8, 128)):
        assert rows_of_block(choices, experts) == rows
    assert rows_of_block(1, 64) == 4
    assert rows_of_block(10**6, 8) == 128


def test_fewer_slots_than_choices():
    setting = Setting(None, 2, 8, 4, 3, 4)
    check(setting, random_plan(5, *setting[1:]), 5, ONLY)

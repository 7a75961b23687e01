"""A step on eight devices equals one device; losses are weighted by tokens; experts are sharded."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from m4.parallel.layout import to_global
from m4.parallel.mesh import make_mesh
from m4.train.average import averaged
from m4.train.optimizer import adafactor, adamw, muon
from m4.train.state import state_shardings
from tests.shared import SMALL_MOE, small_model
from tests.train.trainers import program_of

MODEL = small_model(
    encoder_layers=2,
    decoder_layers=2,
    moe_every=2,
    moe=functools.partial(SMALL_MOE, shared_width=16),
)
# For tests of what is around a step: half as much to trace and to compile.
SHALLOW = small_model()


def mesh_of(data: int, expert: int, model: int = 1, fsdp: int = 1, stage: int = 1):
    sizes = {"stage": stage, "data": data, "fsdp": fsdp, "expert": expert, "model": model}
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def a_batch(rows: int = 8, length: int = 8) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    target = random.integers(2, 32, (rows, length), dtype=np.int32)
    target[:, -2:] = 0  # padding
    segment = (target > 0).astype(np.int32)
    directions = np.repeat(np.arange(rows, dtype=np.int32)[:, None] % 2, length, axis=1)
    return {
        "encoder_input_tokens": random.integers(2, 32, (rows, length), dtype=np.int32),
        "decoder_input_tokens": np.pad(target, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": target,
        "decoder_loss_weights": segment.astype(np.float32),
        "encoder_segment_ids": np.ones((rows, length), np.int32),
        "decoder_segment_ids": segment,
        "direction_ids": directions,
        "encoder_direction_ids": directions.copy(),
    }


def one_step(mesh, optimizer, fsdp_axes=("fsdp",), model=MODEL):
    program = program_of(model, mesh, optimizer, fsdp_axes=fsdp_axes)
    with program.axis_rules():
        batch = to_global(mesh, a_batch())
        state, metrics = jax.block_until_ready(program.jit()(program.new_state(), batch))
    return jax.device_get(state.params), jax.device_get(metrics), state


# data, expert, model, fsdp; and over which of them weights are sharded further. The strategies'
# (tests/test_strategies.py) are not here again.
LAYOUTS = [((1, 2, 2, 2), ("fsdp",)), ((2, 4, 1, 1), ("data", "expert"))]


@functools.cache
def on_one_device():
    optimizer = adafactor(10, smallest_factored=8)
    return optimizer, *one_step(mesh_of(1, 1), optimizer)[:2]


@pytest.mark.parametrize(("layout", "fsdp_axes"), LAYOUTS)
@pytest.mark.thorough
def test_a_step_on_eight_devices_equals_one_device(layout, fsdp_axes):
    # Evaluation's rule for the second expert: the draws of "random" depend on nothing but the
    # key, and the groups are the same on every mesh, so training is compared as it is.
    optimizer, one, metrics_one = on_one_device()
    eight, metrics_eight, state = one_step(mesh_of(*layout), optimizer, fsdp_axes)
    np.testing.assert_allclose(metrics_eight["loss"], metrics_one["loss"], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    wi = state.params["encoder_1"]["moe"]["experts"]["wi"]["kernel"]
    assert wi.sharding.shard_shape(wi.shape)[0] == 4 // layout[1]
    # A weight of the attention has as many shards as `fsdp_axes` times "model".
    sizes = dict(zip(("data", "expert", "model", "fsdp"), layout, strict=True))
    parts = layout[2] * math.prod(sizes[name] for name in fsdp_axes)
    query = state.params["encoder_0"]["attention"]["query"]["kernel"]
    assert math.prod(query.sharding.shard_shape(query.shape)) == query.size // parts


@pytest.mark.parametrize(
    ("optimizer", "statistics"),
    [
        (adamw(10), lambda state: state[1][0].mu),
        (averaged(10, optimizer=adamw), lambda state: state.average),
        (
            muon(10, experts_every=4),
            lambda state: state.inner_states["experts"].inner_state[0].total,
        ),
    ],
    ids=["moments", "averages", "sums of gradients"],
)
def test_statistics_are_sharded_as_their_parameters(optimizer, statistics):
    shardings = state_shardings(mesh_of(2, 4), MODEL, optimizer)
    found, parameter = (
        tree["encoder_1"]["moe"]["experts"]["wi"]["kernel"].spec
        for tree in (statistics(shardings.optimizer), shardings.params)
    )
    assert found == parameter == PartitionSpec(("node", "expert"), None, "model")


def test_an_experts_factored_statistics_are_sharded_as_it():
    shardings = state_shardings(mesh_of(2, 4), MODEL, adafactor(10, smallest_factored=8))
    found = [
        sharding.spec
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings.optimizer)
        if "experts" in jax.tree_util.keystr(path) and "rows" in jax.tree_util.keystr(path)
    ]
    assert found
    assert all(tuple(spec)[:1] == (("node", "expert"),) for spec in found)


def test_loss_is_a_mean_over_tokens():
    # Rows with one real token and with six weigh one and six: not a mean of row means.
    optimizer = adamw(10)
    _, metrics, _ = one_step(mesh_of(1, 1), optimizer, model=SHALLOW)
    np.testing.assert_allclose(metrics["nll"], metrics["nll_sum_D"].sum() / (8 * 6), rtol=1e-5)
    np.testing.assert_array_equal(metrics["tokens_D"], [4 * 6, 4 * 6])
    assert metrics["target_tokens"] == 8 * 6
    assert metrics["source_tokens"] == 8 * 8


@pytest.mark.parametrize("parts", [1, 2])
def test_a_weighted_loss_is_divided_by_the_number_of_tokens(parts):
    """Not by the sum of weights: en-x0 counts three times in the loss, and once in the nll."""
    program = program_of(
        SHALLOW.clone(moe=None), mesh_of(1, 1), adamw(10), grad_accum_steps=parts,
        loss_weights={"en-x0": 3.0, "en-x1": 0.5}, label_smoothing=0.0, z_loss=0.0,
    )  # fmt: skip
    batch = a_batch()
    # Three tokens less for en-x1, so that the directions' tokens are not as many.
    batch["decoder_loss_weights"][1, :3] = 0
    _, metrics = jax.jit(program.step)(program.new_state(), batch)
    np.testing.assert_array_equal(metrics["tokens_D"], [4 * 6, 4 * 6 - 3])
    sums_D, tokens = metrics["nll_sum_D"], 8 * 6 - 3
    np.testing.assert_allclose(metrics["nll"], (sums_D[0] + sums_D[1]) / tokens, rtol=1e-5)
    wanted = (3 * sums_D[0] + 0.5 * sums_D[1]) / tokens
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


def test_dropout_depends_on_seed_and_step_alone():
    model = SHALLOW.clone(dropout_rate=0.5, moe=None)
    optimizer = adamw(10)
    state = program_of(model, mesh_of(1, 1), optimizer).new_state()
    batch = a_batch()
    losses = {}
    for seed in (0, 1):
        step = jax.jit(program_of(model, mesh_of(1, 1), optimizer, seed=seed).step)
        losses[seed] = [float(step(state, batch)[1]["loss"]) for _ in range(2)]
        later = functools.reduce(lambda s, _: step(s, batch)[0], range(2), state)
        assert (
            float(step(dataclasses.replace(later, params=state.params), batch)[1]["loss"])
            != losses[seed][0]
        )
    assert losses[0][0] == losses[0][1]
    assert losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.thorough
def test_threefry_draws_the_same_sharded_and_other_numbers_than_rbg():
    def loss(rng, *sizes):
        model, mesh = SHALLOW.clone(dropout_rate=0.5), mesh_of(*sizes)
        program = program_of(model, mesh, adafactor(10), seed=1, rng=rng)
        with program.axis_rules():
            _, metrics = program.jit()(program.new_state(), to_global(mesh, a_batch()))
            return float(metrics["loss"])

    whole = loss("threefry2x32", 1, 1)
    assert loss("threefry2x32", 2, 4) == pytest.approx(whole, abs=1e-4)
    assert abs(loss("unsafe_rbg", 1, 1) - whole) > 1e-3

"""A step: its loss and statistics, gradients in parts, biases of gates, choices of experts.

A step on eight devices equals one device: tests/test_strategies.py.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from m4.model.dispatch.gather import gather
from m4.model.gates.deepseek import deepseek
from m4.model.gates.switch import switch
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.routing import Routing
from m4.model.stack import unstack
from m4.parallel.mesh import axis_rules_context, make_mesh, to_global
from m4.plan.hlo import collectives, summary
from m4.train.average import averaged
from m4.train.optimizer import adafactor, adamw, muon
from m4.train.program import state_shardings
from m4.train.step import cross_entropy, in_parts
from tests.shared import SMALL_MOE, small_model
from tests.train.trainers import program_of

SHARED = functools.partial(SMALL_MOE, shared_width=16)
MODEL = small_model(encoder_layers=2, decoder_layers=2, moe_every=2, moe=SHARED)
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
        "decoder_target_tokens": target, "decoder_loss_weights": segment.astype(np.float32),
        "encoder_segment_ids": np.ones((rows, length), np.int32), "decoder_segment_ids": segment,
        "direction_ids": directions, "encoder_direction_ids": directions.copy(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "statistics"),
    [
        (adamw(10), lambda state: state[1][0].mu),
        (averaged(10, optimizer=adamw), lambda state: state.average),
        (muon(10, experts_every=4), lambda s: s.inner_states["experts"].inner_state[0].total),
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
    program = program_of(SHALLOW, mesh_of(1, 1), adamw(10))
    _, metrics = program.jit()(program.new_state(), a_batch())
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


def plain(logits_BTV, targets_BT, smoothing, z_loss):
    """Returns the loss by definition: soft targets times -log_softmax, plus z_loss log(Z)^2."""
    vocab = logits_BTV.shape[-1]
    one_hot = jax.nn.one_hot(targets_BT, vocab)
    soft = (1 - smoothing) * one_hot + smoothing / vocab
    log_z = jax.nn.logsumexp(logits_BTV, axis=-1)
    logp = jax.nn.log_softmax(logits_BTV)
    return -jnp.sum(soft * logp, axis=-1) + z_loss * log_z**2


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
def test_equals_the_definition(smoothing, z_loss):
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(2, 3, 7)).astype(np.float32)
    targets: Any = rng.integers(0, 7, (2, 3))
    weights = rng.random((2, 3)).astype(np.float32)

    def ours(x):
        return jnp.sum(cross_entropy(x, targets, smoothing, z_loss).training_BT * weights)

    def theirs(x):
        return jnp.sum(plain(x, targets, smoothing, z_loss) * weights)

    our, their = (jax.jit(jax.value_and_grad(loss))(logits) for loss in (ours, theirs))
    np.testing.assert_allclose(our[0], their[0], rtol=1e-6)
    np.testing.assert_allclose(our[1], their[1], atol=1e-6)


def test_nll_is_not_smoothed():
    # Uniform logits over 4: -log(1/4) = log 4, whatever the smoothing.
    loss = cross_entropy(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32), 0.3, 0.5)
    np.testing.assert_allclose(loss.nll_BT, np.log(4), rtol=1e-6)
    # The training loss adds 0.5 * log(4)^2; smoothing changes nothing where all are equal.
    np.testing.assert_allclose(loss.training_BT, np.log(4) + 0.5 * np.log(4) ** 2, rtol=1e-6)


# One layer a stack; with experts a row is a group and nothing is drawn at random.
DENSE = SHALLOW.clone(moe=None)
EXPERTS = SHALLOW.clone(
    moe=functools.partial(SMALL_MOE, gate=functools.partial(switch, jitter=0.0)), directions=2
)
MODELS = {"dense": DENSE, "experts": EXPERTS}
ROWS = 64
GRADIENT = optax.sgd(1.0)  # the new weights are the old ones less the gradients


def uneven(rows: int) -> dict[str, np.ndarray]:
    """Returns rows with different numbers of target tokens, so that parts differ too."""
    batch = a_batch(rows)
    short = np.arange(8)[None] < 1 + np.arange(rows)[:, None] % 6
    for name in ("decoder_target_tokens", "decoder_segment_ids", "decoder_loss_weights"):
        batch[name] = np.where(short, batch[name], 0).astype(batch[name].dtype)
    return batch


@functools.cache
def accumulated(name: str, mesh, grad_accum_steps: int):
    """Returns the program, the new weights and the metrics."""
    model = MODELS[name]
    program = program_of(model, mesh, GRADIENT, grad_accum_steps=grad_accum_steps)
    with program.axis_rules():
        given = program.new_state(), to_global(mesh, uneven(ROWS))
        compiled: Any = program.jit().lower(*given).compile()
        state, metrics = jax.device_get(compiled(*given))
    return compiled, state.params, metrics


@pytest.mark.parametrize(
    ("name", "sizes", "parts"),
    [
        ("dense", (4, 1), 2),
        pytest.param("dense", (1, 1), 4, marks=pytest.mark.thorough),
        pytest.param("experts", (2, 2), 4, marks=pytest.mark.thorough),
    ],
)
def test_accumulated_parts_make_the_same_step(name, sizes, parts):
    _, params, metrics = accumulated(name, mesh_of(1, 1), 1)
    _, found, its = accumulated(name, mesh_of(*sizes), parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, params)
    assert set(its) == set(metrics)
    assert bool(metrics["layers"]) == bool(metrics["expert_loads"]) == (name == "experts")
    # The experts' other metrics are means of the parts' values: of "dead_experts" another number.
    same = {"loss", "nll", "gradient_norm", "nll_sum_D", "auxiliary_loss"}
    for entry in same & set(metrics):
        np.testing.assert_allclose(its[entry], metrics[entry], rtol=1e-5)
    for entry in ("expert_loads", "data_counts", "tokens_D", "target_tokens", "source_tokens"):
        jax.tree.map(np.testing.assert_array_equal, its[entry], metrics[entry])


def test_rows_are_cut_on_their_devices():
    """On 4 devices with 4 rows each, each of 2 parts has two rows of every device."""
    mesh = mesh_of(4, 1)
    rows = np.arange(16, dtype=np.int32)[:, None]
    with axis_rules_context(mesh):
        program = jax.jit(lambda x: in_parts(x, 2)).lower(to_global(mesh, {"x": rows})).compile()
        parts = program(to_global(mesh, {"x": rows}))["x"]
    assert not collectives(program.as_text() or "")
    np.testing.assert_array_equal(
        parts[..., 0], [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    )
    assert parts.sharding == NamedSharding(mesh, PartitionSpec(None, "data"))


def test_only_sums_are_sent():
    program, *_ = accumulated("dense", mesh_of(4, 1), 2)
    assert set(summary(collectives(program.as_text() or ""))) == {"all-reduce"}


def test_a_part_needs_less_memory():
    """Temporary memory is mostly activations here, so that 4 parts need less than half."""
    whole, part = (accumulated("dense", mesh_of(1, 1), n)[0].memory_analysis() for n in (1, 4))
    assert part.temp_size_in_bytes < whole.temp_size_in_bytes / 2


def test_every_part_has_a_separate_dropout_key():
    """Both parts have equal rows of different directions, so that only dropout can differ."""
    batch = a_batch(8)
    batch = {name: np.tile(value[:4], (2, 1)) for name, value in batch.items()}
    ids = np.repeat(np.arange(2, dtype=np.int32), 4)[:, None]
    for name in ("direction_ids", "encoder_direction_ids"):
        batch[name] = ids + np.zeros_like(batch[name])
    sums_D = {}
    for rate in (0.0, 0.5):
        model = DENSE.clone(dropout_rate=rate)
        program = program_of(model, mesh_of(1, 1), GRADIENT, grad_accum_steps=2)
        with program.axis_rules():
            _, metrics = program.jit()(program.new_state(), batch)
        sums_D[rate] = np.asarray(metrics["nll_sum_D"])
    np.testing.assert_allclose(*sums_D[0.0], rtol=1e-6)
    first, second = sums_D[0.5]
    assert abs(first - second) > 1e-3 * first


RATE = 0.01
# Nothing is dropped, so that the choices that are counted by direction are those before capacity.
# `gather` compiles in half the time of `dropless`.
BIASED_MOE = functools.partial(
    SMALL_MOE, gate=functools.partial(deepseek, bias_rate=RATE, expert_groups=2),
    train_capacity_factor=None, dropless_dispatch=gather,
)  # fmt: skip
BIASED = small_model(moe=BIASED_MOE, directions=2, encoder_layers=2)


def biases_of(params) -> dict[str, np.ndarray]:
    layers = {name: tree for name, tree in unstack(params).items() if "moe" in tree}
    return {name: np.asarray(tree["moe"]["bias"]["table"]) for name, tree in layers.items()}


def after(model, optimizer, steps, *, mesh=None, parts=1):
    """Returns (biases, loads of the last step) by layer after some steps."""
    program = program_of(model, mesh or mesh_of(1, 1), optimizer, grad_accum_steps=parts)
    with program.axis_rules():
        batch = to_global(program.mesh, a_batch())
        state, step, metrics = program.new_state(), program.jit(), {}
        for _ in range(steps):
            state, metrics = step(state, batch)
    assert "bias_loads" not in metrics
    loads = jax.device_get(metrics["expert_loads"])
    return biases_of(jax.device_get(state.params)), {
        name: load_DE.sum(axis=0) for name, load_DE in loads.items()
    }


def moved(load_E: np.ndarray) -> np.ndarray:
    return np.float32(RATE) * np.sign(load_E.mean() - load_E).astype(np.float32)


@pytest.mark.parametrize(
    ("model", "mesh", "parts"),
    [
        (BIASED, (2, 2), 2),
        pytest.param(BIASED.clone(scan_layers=True), (2, 1), 2, marks=pytest.mark.thorough),
        (SHALLOW.clone(moe=BIASED_MOE, directions=2), (1, 1), 1),
    ],
    ids=["experts apart", "scanned", "one device"],
)
def test_a_step_moves_every_bias_against_its_load_in_the_whole_batch(model, mesh, parts):
    """On several devices, in two parts, as on one; weight decay leaves it alone."""
    biases, loads = after(model, adamw(9, weight_decay=0.5), 1, mesh=mesh_of(*mesh), parts=parts)
    assert biases.keys() == loads.keys()
    assert biases
    for name, bias_E in biases.items():
        np.testing.assert_allclose(bias_E, moved(loads[name]), rtol=1e-6)
        assert bias_E.any()


def test_without_a_rate_the_bias_stays():
    fixed = functools.partial(BIASED_MOE, gate=functools.partial(deepseek, bias_rate=0.0))
    biases, _ = after(SHALLOW.clone(moe=fixed, directions=2), adafactor(9), 2)
    assert biases
    assert not any(bias_E.any() for bias_E in biases.values())


DIRECTIONS = 3


def a_batch_of_directions() -> dict[str, np.ndarray]:
    """Returns packed rows whose halves have different directions, with 0 in padding."""
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
def counted_step(mesh: Any, **options: Any) -> dict[str, Any]:
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
                *(routing.expert_GSK, routing.position_GSK), ordered=True,
            )  # fmt: skip
        return routing

    # A small capacity, so that some choices find no slot: 2 * 8 * .25 / 4 = 1, raised to 4.
    moe = functools.partial(SMALL_MOE, gate=seen_gate, train_capacity_factor=0.25)
    metrics = counted_step(mesh_of(1, 1), directions=DIRECTIONS, moe=moe)
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


def test_counts_on_eight_devices_are_those_on_one() -> None:
    one = counted_step(mesh_of(1, 1), directions=DIRECTIONS)["expert_loads"]
    eight = counted_step(mesh_of(2, 4), directions=DIRECTIONS)["expert_loads"]
    jax.tree.map(np.testing.assert_array_equal, one, eight)

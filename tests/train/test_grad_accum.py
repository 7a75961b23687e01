"""Accumulated gradients make the same step: equal loss, gradients and counts, in less memory."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from m4.model.gates.switch import switch
from m4.parallel.layout import to_global
from m4.parallel.mesh import axis_rules_context
from m4.plan.hlo import collectives, summary
from m4.train.step import in_parts
from tests.shared import SMALL_MOE
from tests.train.test_step import SHALLOW, a_batch, mesh_of
from tests.train.trainers import program_of

# One layer a stack; with experts a row is a group and nothing is drawn at random.
DENSE = SHALLOW.clone(moe=None)
EXPERTS = SHALLOW.clone(
    moe=functools.partial(SMALL_MOE, gate=functools.partial(switch, jitter=0.0)), directions=2
)
MODELS = {"dense": DENSE, "experts": EXPERTS}
ROWS = 64
GRADIENT = optax.sgd(1.0)  # the new weights are the old ones less the gradients


def uneven(rows: int) -> dict[str, np.ndarray]:
    """Rows with different numbers of target tokens, so that parts differ too."""
    batch = a_batch(rows)
    short = np.arange(8)[None] < 1 + np.arange(rows)[:, None] % 6
    for name in ("decoder_target_tokens", "decoder_segment_ids", "decoder_loss_weights"):
        batch[name] = np.where(short, batch[name], 0).astype(batch[name].dtype)
    return batch


@functools.cache
def one_step(name: str, mesh, grad_accum_steps: int):
    """The program, the new weights, the metrics."""
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
    _, params, metrics = one_step(name, mesh_of(1, 1), 1)
    _, found, its = one_step(name, mesh_of(*sizes), parts)
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
    program, *_ = one_step("dense", mesh_of(4, 1), 2)
    assert set(summary(collectives(program.as_text() or ""))) == {"all-reduce"}


def test_a_part_needs_less_memory():
    """Temporary memory is mostly activations here, so that 4 parts need less than half."""
    whole, part = (one_step("dense", mesh_of(1, 1), n)[0].memory_analysis() for n in (1, 4))
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

"""A step moves the biases of gates by the whole batch's loads, and nothing else moves them."""

import functools

import jax
import numpy as np
import optax
import pytest

from m4.model.gates.deepseek import deepseek
from m4.model.stack import unstack
from m4.parallel.layout import to_global
from m4.train.optimizer import adafactor, adamw
from tests.shared import SMALL_MOE, small_model
from tests.train.test_step import a_batch, mesh_of
from tests.train.trainers import program_of

RATE = 0.01
# Nothing is dropped, so that the choices that are counted by direction are those before capacity.
MOE = functools.partial(
    SMALL_MOE,
    gate=functools.partial(deepseek, bias_rate=RATE, expert_groups=2),
    train_capacity_factor=None,
)
MODEL = small_model(moe=MOE, directions=2, encoder_layers=2)


def biases_of(params) -> dict[str, np.ndarray]:
    layers = {name: tree for name, tree in unstack(params).items() if "moe" in tree}
    return {name: np.asarray(tree["moe"]["bias"]["table"]) for name, tree in layers.items()}


def after(model, optimizer, steps, *, mesh=None, parts=1):
    """(The biases by layer, the loads of the last step by layer) after so many steps."""
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


def test_a_step_moves_every_bias_against_its_load():
    # Optimizers with weight decay, momentum and rates of 1 leave it alone.
    for optimizer in (optax.sgd(1.0), adamw(9, weight_decay=0.5)):
        biases, loads = after(MODEL, optimizer, 1)
        assert len(biases) == len(loads) == 3
        for name, bias_E in biases.items():
            np.testing.assert_array_equal(bias_E, moved(loads[name]))
            assert bias_E.any()


@pytest.mark.parametrize(
    ("model", "mesh", "parts"),
    [(MODEL, (2, 2), 1), (MODEL, (1, 1), 4), (MODEL.clone(scan_layers=True), (2, 1), 2)],
    ids=["devices", "parts", "scanned"],
)
def test_devices_parts_and_scans_have_the_load_of_the_whole_batch(model, mesh, parts):
    biases, loads = after(model, optax.sgd(0.0), 1, mesh=mesh_of(*mesh), parts=parts)
    for name, bias_E in biases.items():
        np.testing.assert_allclose(bias_E, moved(loads[name]), rtol=1e-6)
        assert bias_E.any()


def test_without_a_rate_the_bias_stays():
    fixed = functools.partial(MOE, gate=functools.partial(deepseek, bias_rate=0.0))
    biases, _ = after(MODEL.clone(moe=fixed), adafactor(9), 2)
    assert not any(bias_E.any() for bias_E in biases.values())

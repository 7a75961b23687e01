"""The generators of training's random numbers."""

import jax
import pytest

from m4.parallel.host_batches import to_global
from m4.parallel.mesh import axis_rules_context
from m4.train.optimizer import adafactor
from m4.train.state import create
from m4.train.step import make_train_step
from tests.train.test_step import SHALLOW, a_batch, mesh_of

DROPPING = SHALLOW.clone(dropout_rate=0.5)


def loss(rng: str, *sizes: int) -> float:
    optimizer = adafactor(10)
    mesh = mesh_of(*sizes)
    state, _ = create(mesh, DROPPING, optimizer, 0)
    step = make_train_step(DROPPING, optimizer, directions=2, seed=1, rng=rng)
    with axis_rules_context(mesh):
        _, metrics = jax.jit(step)(state, to_global(mesh, a_batch()))
        return float(metrics["loss"])


@pytest.mark.slow
@pytest.mark.thorough
def test_threefry_draws_the_same_in_parts_and_other_numbers_than_rbg() -> None:
    whole = loss("threefry2x32", 1, 1)
    assert loss("threefry2x32", 2, 4) == pytest.approx(whole, abs=1e-4)
    assert abs(loss("unsafe_rbg", 1, 1) - whole) > 1e-3


def test_another_generator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loop.train.rng = 'dice': must be one of unsafe_rbg, "):
        make_train_step(DROPPING, adafactor(10), directions=2, seed=0, rng="dice")

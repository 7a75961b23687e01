"""The generators of training's random numbers."""

import pytest

from m4.parallel.host_batches import to_global
from m4.settings import SettingError
from m4.train.optimizer import adafactor
from tests.train.test_step import SHALLOW, a_batch, mesh_of
from tests.train.trainers import program_of, training_of

DROPPING = SHALLOW.clone(dropout_rate=0.5)


def loss(rng: str, *sizes: int) -> float:
    optimizer = adafactor(10)
    mesh = mesh_of(*sizes)
    program = program_of(DROPPING, mesh, optimizer, seed=1, rng=rng)
    with program.axis_rules():
        _, metrics = program.jit()(program.new_state(), to_global(mesh, a_batch()))
        return float(metrics["loss"])


@pytest.mark.slow
@pytest.mark.thorough
def test_threefry_draws_the_same_sharded_and_other_numbers_than_rbg() -> None:
    whole = loss("threefry2x32", 1, 1)
    assert loss("threefry2x32", 2, 4) == pytest.approx(whole, abs=1e-4)
    assert abs(loss("unsafe_rbg", 1, 1) - whole) > 1e-3


def test_another_generator_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^Training.rng = 'dice': must be one of unsafe_rbg, "):
        training_of(rng="dice")

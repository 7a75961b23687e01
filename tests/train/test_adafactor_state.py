"""The state of T5X's Adafactor in m4's, also where only one of them factors a matrix."""

import jax.numpy as jnp
import numpy as np
import pytest

from m4.settings import SettingError
from m4.train import optimizer
from m4.train.initial import check_adafactor, with_moments

# Rows are multiples of each other, so that rows and columns stand for the whole.
FULL = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)
FACTORS = {"rows": FULL.mean(-1), "columns": FULL.mean(-2)}
STACK = {"encoder_blocks": {"layer_0": {"mlp": {"wi": {"kernel": jnp.ones((2, 2, 2))}}}}}
PARAMS = {**STACK, "encoder_norm": {"scale": jnp.ones(3)}}


@pytest.mark.parametrize("smallest", [2, 3])
@pytest.mark.parametrize("given", [{"": FULL}, FACTORS])
def test_a_scanned_stack_gets_each_layers_moments(smallest: int, given: dict) -> None:
    of = optimizer.adafactor(10, smallest_factored=smallest)
    doubled = {name: 2 * value for name, value in given.items()}
    made = {
        "encoder_0/mlp/wi/kernel": given,
        "encoder_1/mlp/wi/kernel": doubled,
        "encoder_norm/scale": {"": np.arange(3.0)},
    }
    factored, _, rate = with_moments(of.init(PARAMS), 7, made)
    assert int(factored.count) == int(rate.count) == 7
    moment = factored.moments["encoder_blocks"]["layer_0"]["mlp"]["wi"]["kernel"]
    if smallest == 2:
        assert np.allclose(moment.rows, [FACTORS["rows"], 2 * FACTORS["rows"]])
        assert np.allclose(moment.columns, [FACTORS["columns"], 2 * FACTORS["columns"]])
    else:
        assert np.allclose(moment, [FULL, 2 * FULL])
    assert np.array_equal(factored.moments["encoder_norm"]["scale"], np.arange(3.0))


def test_another_optimizer_is_refused() -> None:
    check_adafactor(optimizer.adafactor(10))
    with pytest.raises(SettingError, match="the optimizer is another"):
        check_adafactor(optimizer.adamw(10))

"""The k largest: `lax.top_k` is the reference, for ties too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from m4.eval.decoding.top_k import top_k

SHAPES = [
    (3, 8192, 2),
    (2, 4 * 3072, 8),
    (2, 400, 8),  # chunks of 16
    (2, 997, 8),  # a prime: in one stage
    (2, 64, 64),
]


@pytest.mark.parametrize("few", [None, 3, 1], ids=["different", "many ties", "all equal"])
@pytest.mark.parametrize(("rows", "numbers", "k"), SHAPES)
def test_equals_lax(rows, numbers, k, few):
    rng = np.random.default_rng(numbers)
    x_BN = rng.normal(size=(rows, numbers))
    if few is not None:
        x_BN = rng.integers(few, size=(rows, numbers))
    # Ended and dead hypotheses.
    x_BN = np.where(rng.random((rows, numbers)) < 0.1, -np.inf, x_BN).astype(np.float32)
    x_BN[0, : numbers // 2] = -1e7
    for got, expected in zip(
        jax.jit(top_k, static_argnums=1)(x_BN, k), lax.top_k(x_BN, k), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_cpus_sort_no_whole_row():
    text = jax.jit(lambda x_BN: top_k(x_BN, 4)).lower(jnp.zeros((2, 1024))).as_text()
    assert "tensor<2x8x128xf32>" in text

"""The products' hand-written gradients are those of the plain einsums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.product import expert_product, product, tied_logits

# More columns than rows of the weight, and fewer, also with an even number of cache lines a row
# (64 numbers are 4 in float32, 2 in bfloat16): the ways of a weight's gradient.
SIDES = [(3, 5), (7, 2), (64, 2), (40, 50), (50, 40)]


def drawn(*shapes: tuple[int, ...], dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def assert_same_with_gradients(ours, plain, x, w, direction) -> None:
    results = [jax.jit(lambda x, w, f=f: jax.vjp(f, x, w)[1](direction)) for f in (ours, plain)]
    np.testing.assert_allclose(ours(x, w), plain(x, w), rtol=1e-5, atol=1e-5)
    got, expected = (f(x, w) for f in results)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize(("K", "N"), SIDES)
@pytest.mark.parametrize("ours", [product, expert_product, tied_logits])
def test_each_is_its_einsum(ours, K, N):
    formula, rows, weight = {
        product: ("BLK,KN->BLN", (2, 4), (K, N)),
        expert_product: ("EGCM,EMF->EGCF", (3, 2, 4), (3, K, N)),
        tied_logits: ("BTM,VM->BTV", (2, 4), (N, K)),
    }[ours]
    x, w, direction = drawn((*rows, K), weight, (*rows, N))
    assert_same_with_gradients(ours, lambda x, w: jnp.einsum(formula, x, w), x, w, direction)


@pytest.mark.parametrize(("K", "N"), SIDES)
def test_types_stay(K, N):
    x, w, direction = drawn((2, 4, K), (K, N), (2, 4, N), dtype=jnp.bfloat16)
    result, back = jax.vjp(product, x, w)
    assert {a.dtype for a in (result, *back(direction))} == {jnp.dtype(jnp.bfloat16)}


def test_tied_logits_of_bfloat16_are_not_rounded():
    x, w, direction = drawn((2, 4, 64), (40, 64), (2, 4, 40), dtype=jnp.bfloat16)
    result, back = jax.vjp(tied_logits, x, w)
    exact = np.einsum("BTM,VM->BTV", *(np.asarray(a, np.float64) for a in (x, w)))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)
    # Gradients have the type of what they are of.
    assert [a.dtype for a in back(direction.astype(jnp.float32))] == [jnp.bfloat16] * 2

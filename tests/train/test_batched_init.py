"""Draws made together are those made one by one, in a fraction of the instructions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.train.program import draw_together

SHAPES = [(3, 5), (5, 3), (3, 5), (7,), (3, 5), (7,)]


def draws(key, scale) -> dict[str, Any]:
    keys = [jax.random.fold_in(key, i) for i in range(len(SHAPES))]
    normal = [scale * jax.random.normal(k, shape) for k, shape in zip(keys, SHAPES, strict=True)]
    cut = [jax.random.truncated_normal(k, -2.0, 2.0, s) for k, s in zip(keys, SHAPES, strict=True)]
    # One that needs another's result, and other kinds of key.
    chained = jax.random.uniform(jax.random.split(keys[0])[1], (3, 5))
    later = jax.random.normal(jax.random.fold_in(keys[1], jnp.int32(chained[0, 0] * 100)), (3, 5))
    ranks = [jax.random.permutation(k, 6) for k in keys[:2]]
    return {"normal": normal, "cut": cut, "chained": (chained, later), "ranks": ranks, "key": key}


def test_batched_draws_are_the_plain_draws():
    arguments = jax.random.key(3), jnp.float32(0.5)
    programs = [jax.jit(f).lower(*arguments).compile() for f in (draws, draw_together(draws))]
    plain, together = (program(*arguments) for program in programs)
    assert jax.tree.structure(plain) == jax.tree.structure(together)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(together), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        # The same bits; products and sums may be fused elsewhere, and what is nearly 0 is
        # a difference of numbers of about 1.
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)


def test_like_draws_become_one():
    def weights(key):
        return [
            jax.random.normal(jax.random.fold_in(key, i), shape) for i, shape in enumerate(SHAPES)
        ]

    # Each function that draws calls another one; there is one a shape.
    texts = [
        jax.jit(f).lower(jax.random.key(0)).as_text() for f in (weights, draw_together(weights))
    ]
    assert [text.count("call @_normal") for text in texts] == [6 + 3, 3 + 3]
    assert [text.count("call @_normal_real") for text in texts] == [3, 3]

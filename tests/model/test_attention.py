"""T5's buckets of distances, against its formula in plain numbers; what dropout leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.attention import Attention, relative_buckets


def plain(offset: int, bidirectional: bool, buckets: int, distance: int) -> int:
    """Raffel et al. 2020, section 2.1: half of the buckets are exact, the others logarithmic.

    Bucket exact + i begins at exact * (distance / exact)^(i / (buckets - exact)).
    """
    start, behind = 0, max(-offset, 0)
    if bidirectional:
        buckets //= 2
        start, behind = buckets * (offset > 0), abs(offset)
    exact = buckets // 2
    if behind < exact:
        return start + behind
    far = buckets - exact
    edges = [exact * (distance / exact) ** (i / far) for i in range(1, far)]
    # An edge that is a whole number belongs to the bucket that begins there.
    return start + exact + sum(behind > edge * (1 - 1e-6) for edge in edges)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (32, 64), (16, 100), (64, 1000)])
def test_buckets_are_t5s(bidirectional: bool, buckets: int, distance: int) -> None:
    offsets = jnp.arange(-1200, 1201)
    found = relative_buckets(
        offsets, bidirectional=bidirectional, buckets=buckets, distance=distance
    )
    wanted = [plain(int(offset), bidirectional, buckets, distance) for offset in offsets]
    np.testing.assert_array_equal(found, wanted)


def test_dropout_leaves_out_a_key_for_all_queries_of_a_row() -> None:
    """One mask [B, N, 1, R], as in T5, so that queries that are alike have the same result."""
    layer = Attention(heads=2, head_width=4, dropout_rate=0.5)
    y_BRM = jax.random.normal(jax.random.key(0), (3, 6, 8))
    x_BQM = jnp.ones((3, 5, 8))
    params = layer.init(jax.random.key(1), x_BQM, y_BRM, deterministic=True)
    found, whole = (
        layer.apply(params, x_BQM, y_BRM, deterministic=off, rngs={"dropout": jax.random.key(2)})
        for off in (False, True)
    )
    found, whole = np.asarray(found), np.asarray(whole)
    np.testing.assert_array_equal(found, np.broadcast_to(found[:, :1], found.shape))
    assert (np.abs(found - whole).max(axis=(1, 2)) > 1e-3).all()

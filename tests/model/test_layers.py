"""Small layers and T5's buckets of distances against their definitions in plain numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.attention import Attention, relative_buckets
from m4.model.layers import Embed, SinusoidalPositions, dropout


def test_positions_are_the_papers() -> None:
    """Vaswani et al. 2017, section 3.5: sines and cosines of pos / 10000^(2i / M).

    The paper interleaves them; here the sines come first (as in Tensor2Tensor), which is the same
    model with its axes in another order.
    """
    positions_BT, M = np.array([[0, 1, 7], [3, 100, 0]]), 10
    found = SinusoidalPositions(M).apply({}, 3, jnp.asarray(positions_BT))
    wanted = np.zeros((2, 3, M))
    for i in range(M // 2):
        angle = positions_BT / 10000 ** (2 * i / M)
        wanted[..., i], wanted[..., M // 2 + i] = np.sin(angle), np.cos(angle)
    np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-5)


def test_an_embedding_and_its_logits_have_unit_variance_at_first() -> None:
    layer = Embed(vocab_size=3000, features=64)
    tokens = jnp.arange(3000)[None]
    params = layer.init(jax.random.key(0), tokens)
    rows = np.asarray(layer.apply(params, tokens))[0]
    np.testing.assert_allclose(rows.std(), 1.0, rtol=0.02)
    x_BTM = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 64)), jnp.float32)
    logits = np.asarray(layer.apply(params, x_BTM, method="attend"))
    np.testing.assert_allclose(logits.std(), 1.0, rtol=0.2)
    np.testing.assert_allclose(logits[0], x_BTM[0] @ (rows.T / 8), rtol=1e-4, atol=1e-4)


def test_dropout_has_one_mask_for_all_positions_of_a_row() -> None:
    ones = jnp.ones((3, 5, 64))
    apply = jax.jit(lambda key: dropout(0.5).apply({}, ones, deterministic=False, rngs=key))
    found = np.asarray(apply({"dropout": jax.random.key(0)}))
    assert {*found.ravel().tolist()} == {0.0, 2.0}
    np.testing.assert_array_equal(found, np.broadcast_to(found[:, :1], found.shape))
    assert len({row.tobytes() for row in found}) == 3


def plain(offset: int, bidirectional: bool, buckets: int, distance: int) -> int:
    """Returns a bucket by Raffel et al. 2020, section 2.1: half are exact, others logarithmic.

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

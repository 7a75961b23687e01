"""Multi-head attention with T5's relative position bias; decoding with a cache."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from m4.model.layers import Array, Kernel, constrain, parameter
from m4.model.product import product


def relative_buckets(offset: Array, bidirectional: bool, buckets: int, distance: int) -> Array:
    """Returns T5's bucket of each offset, exact when near and logarithmic up to `distance`.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.

    Args:
        offset: Position of the key minus position of the query, int32.
        bidirectional: Whether keys after the query get half of the buckets, or all bucket 0.
        distance: Offset from which on all get the last bucket of their half.
    """
    result = jnp.zeros_like(offset)
    behind = -offset
    if bidirectional:
        buckets //= 2
        result = result + (behind < 0) * buckets
        behind = jnp.abs(behind)
    else:
        behind = jnp.maximum(behind, 0)
    exact = buckets // 2
    scale = (buckets - exact) / np.log(distance / exact)
    # T5's epsilon: rounding decides the bucket at exact powers, and T5's weights must carry over.
    far = exact + (
        jnp.log(behind.astype(jnp.float32) / exact + np.finfo(np.float32).eps) * scale
    ).astype(jnp.int32)
    return result + jnp.where(behind < exact, behind, jnp.minimum(far, buckets - 1))


class RelativeBias(nn.Module):
    """A learned bias for each head and bucket, [1, N, Q, R]; all layers of a stack share it.

    In decoding, Q is only the current position (its index is a leaf of the cache), and R counts the
    `max_decode_length` positions of the cache. If not `shared`, it returns the buckets [1, Q, R],
    which each layer looks up in its own table (umT5, arXiv 2304.09151).
    """

    heads: int
    bidirectional: bool
    buckets: int = 32
    distance: int = 128
    shared: bool = True

    @nn.compact
    def __call__(
        self, length: int, *, decode: bool = False, max_decode_length: int | None = None
    ) -> Array:
        table_NK = _bias_table(self) if self.shared else None
        query_Q = key_R = jnp.arange(length)
        if decode:
            allocated = self.has_variable("cache", "cache_index")
            index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
            if allocated:
                assert max_decode_length is not None, "decoding needs the cache's length"
                query_Q, key_R = index.value[None], jnp.arange(max_decode_length)
                index.value = index.value + 1
        offset_QR = key_R[None, :] - query_Q[:, None]
        bucket_QR = relative_buckets(offset_QR, self.bidirectional, self.buckets, self.distance)
        return bucket_QR[None] if table_NK is None else jnp.take(table_NK, bucket_QR, axis=1)[None]


def _bias_table(module: Any) -> Array:
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    shape, axes = (module.heads, module.buckets), ("heads", "relpos_buckets")
    return parameter(module, "rel_embedding", init, shape, axes)


class Attention(nn.Module):
    """Attention of queries x_BQM over memory y_BRM, with four projections without biases.

    With `decode=True` a call works on one position, Q = 1. The past is kept in the collection
    `cache`, by T5X's names and rules (docs/model.md): `cached_key` and `cached_value` [B, N, R, D]
    and the scalar `cache_index` in self-attention; `cross_key` [B, N, D, R] and `cross_value`
    [B, N, R, D] in cross-attention, projected once, at position 0, because the memory never
    changes. They may have a row per sentence while `x_BQM` has a row per beam; the beams of a
    sentence are adjacent. The first call only allocates the cache, with R as the input's length.
    """

    heads: int
    head_width: int
    buckets: int = 32  # number of relative positions, if the layer has its own table
    dropout_rate: float = 0.1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x_BQM: Array,
        y_BRM: Array,
        *,
        bias: Array | None = None,
        mask_BQR: Array | None = None,
        deterministic: bool,
        decode: bool = False,
        cross: bool = False,
    ) -> Array:
        """Returns [B, Q, M]; the softmax is computed in float32.

        Args:
            y_BRM: Memory; `x_BQM` in self-attention.
            bias: Result of `RelativeBias`: a bias, or buckets for the layer's own table.
            mask_BQR: True where a query may look. Defaults to everywhere.
        """
        M, ND = x_BQM.shape[-1], self.heads * self.head_width
        q_kernel = Kernel((M, ND), ("embed", "joined_kv"), name="query")()
        k_kernel = Kernel((M, ND), ("embed", "joined_kv"), name="key")()
        v_kernel = Kernel((M, ND), ("embed", "joined_kv"), name="value")()
        out_kernel = Kernel((ND, M), ("joined_kv", "embed"), name="out")()

        def heads(x: Array, kernel: Array) -> Array:
            y = product(x.astype(self.dtype), kernel.astype(self.dtype))
            return y.reshape(*y.shape[:-1], self.heads, self.head_width)

        q_BQND = heads(x_BQM, q_kernel) * self.head_width**-0.5
        # The cache has the layout that its two products need: with one query, transposing the
        # whole past at every step would take longer than the products.
        keys, rows = "BNRD" if decode else "BRND", q_BQND.shape[:2]
        if decode and cross:
            keys = "BNDR"

            def project(y_BRM: Array) -> tuple[Array, Array]:
                k_BRND, v_BRND = heads(y_BRM, k_kernel), heads(y_BRM, v_kernel)
                return jnp.moveaxis(k_BRND, 1, 3), heads_first(v_BRND)

            k, v = self._cross_cache(y_BRM, project)
        else:
            k, v = heads(y_BRM, k_kernel), heads(y_BRM, v_kernel)
            if decode:
                k, v, mask_BQR = self._self_cache(heads_first(k), heads_first(v))
        if len(k) < len(q_BQND):  # a sentence's beams are queries over its memory
            q_BQND = q_BQND.reshape(len(k), -1, *q_BQND.shape[2:])
            mask_BQR = None if mask_BQR is None else mask_BQR.reshape(len(k), -1, k.shape[3])
        logits_BNQR = jnp.einsum(f"BQND,{keys}->BNQR", q_BQND, k).astype(jnp.float32)
        if bias is not None:
            if bias.ndim == 3:
                bias = jnp.take(_bias_table(self), bias[0], axis=1)[None]
            logits_BNQR = logits_BNQR + bias.astype(jnp.float32)
        if mask_BQR is not None:
            # Finite, so that a row that may attend to nothing (padding) does not become NaN.
            logits_BNQR = jnp.where(mask_BQR[:, None], logits_BNQR, -1e10)
        weights_BNQR = jax.nn.softmax(logits_BNQR).astype(self.dtype)
        weights_BNQR = nn.Dropout(self.dropout_rate, broadcast_dims=(-2,))(
            weights_BNQR, deterministic=deterministic
        )
        if decode:  # in this order, XLA's CPU library runs it as one product
            mixed_BQND = heads_first(jnp.matmul(weights_BNQR, v))
        else:
            mixed_BQND = jnp.einsum("BNQR,BRND->BQND", weights_BNQR, v)
        mixed_BQH = mixed_BQND.reshape(*rows, ND)
        mixed_BQH = constrain(mixed_BQH, ("batch", "length", "joined_kv"))
        return product(mixed_BQH, out_kernel.astype(self.dtype))

    def _self_cache(self, k_BNQD: Array, v_BNQD: Array) -> tuple[Array, Array, Array]:
        """Writes one position; returns all keys and values, and a mask of filled ones [1, 1, R]."""
        allocated = self.has_variable("cache", "cached_key")
        keys = self.variable("cache", "cached_key", jnp.zeros, k_BNQD.shape, k_BNQD.dtype)
        values = self.variable("cache", "cached_value", jnp.zeros, v_BNQD.shape, v_BNQD.dtype)
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        if not allocated:
            length = k_BNQD.shape[2]
            return k_BNQD, v_BNQD, jnp.tril(jnp.ones((length, length), bool))[None]
        at = index.value
        keys.value = jax.lax.dynamic_update_slice_in_dim(keys.value, k_BNQD, at, axis=2)
        values.value = jax.lax.dynamic_update_slice_in_dim(values.value, v_BNQD, at, axis=2)
        index.value = index.value + 1
        seen_R = jnp.arange(keys.value.shape[2]) <= at
        return keys.value, values.value, seen_R[None, None, :]

    def _cross_cache(
        self, y_BRM: Array, project: Callable[[Array], tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        """Projects the memory at position 0; later reads it from the cache."""
        allocated = self.has_variable("cache", "cross_key")
        # Without `cache_index` it was filled before the first step (`m4.eval.decoding.search`).
        filled = allocated and not self.has_variable("cache", "cache_index")
        (B, R, _), N, D = y_BRM.shape, self.heads, self.head_width
        keys = self.variable("cache", "cross_key", jnp.zeros, (B, N, D, R), self.dtype)
        values = self.variable("cache", "cross_value", jnp.zeros, (B, N, R, D), self.dtype)
        if filled:
            return keys.value, values.value
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        if not allocated:
            return project(y_BRM)
        keys.value, values.value = jax.lax.cond(
            index.value == 0, project, lambda _: (keys.value, values.value), y_BRM
        )
        index.value = index.value + 1
        return keys.value, values.value


def heads_first(x_BRND: Array) -> Array:
    """Transposes [B, R, N, D] to [B, N, R, D], or back."""
    return jnp.swapaxes(x_BRND, 1, 2)

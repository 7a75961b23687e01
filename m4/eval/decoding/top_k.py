"""The k largest of many numbers, as a step of a search wants them."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from m4.parallel.mesh import split_axes

_LARGEST_CHUNK, _SMALLEST_CHUNK = 128, 16


def top_k(x_BN: Array, k: int) -> tuple[Array, Array]:
    """Returns values and indices [B, k], the largest first, ties by the lowest index.

    Over a mesh each device takes its local rows: where the partitioner decides, it may bring all
    rows, B * K * V numbers, to every device at every step (it does on CPU, jax 0.10.2).
    """
    mesh = jax.sharding.get_abstract_mesh()
    over = split_axes(mesh, "batch")
    local = functools.partial(_on_a_device, k=k)
    if not over or x_BN.shape[0] % math.prod(mesh.shape[axis] for axis in over):
        return local(x_BN)
    rows = PartitionSpec(over)
    return jax.shard_map(local, in_specs=rows, out_specs=rows, axis_names={*over})(x_BN)


def _on_a_device(x_BN: Array, k: int) -> tuple[Array, Array]:
    whole = functools.partial(_whole, k=k)
    N = x_BN.shape[1]
    chunk = math.gcd(N, _LARGEST_CHUNK)
    if chunk < _SMALLEST_CHUNK or 2 * k * chunk > N:
        return whole(x_BN)
    by_chunks = functools.partial(_by_chunks, k=k, chunk=chunk)
    return lax.platform_dependent(x_BN, cpu=by_chunks, default=whole)


def _whole(x_BN: Array, k: int) -> tuple[Array, Array]:
    value_Bk, index_Bk = lax.top_k(x_BN, k)
    return value_Bk, index_Bk


def _by_chunks(x_BN: Array, k: int, chunk: int) -> tuple[Array, Array]:
    """Returns the top k from k chunks of each row, those with the largest maxima.

    Each number of another chunk has k before it, the maxima of these: larger, or as large with a
    lower index. CPUs find maxima in one quick pass, where `lax.top_k` keeps a heap.
    """
    x_BCc = x_BN.reshape(x_BN.shape[0], -1, chunk)
    _, chunk_Bk = lax.top_k(jnp.max(x_BCc, axis=2), k)
    chunk_Bk = jnp.sort(chunk_Bk, axis=1)  # so that among equals the lowest index stays the first
    kept_Bkc = jnp.take_along_axis(x_BCc, chunk_Bk[:, :, None], axis=1)
    value_Bk, place_Bk = lax.top_k(kept_Bkc.reshape(len(x_BN), -1), k)
    of_Bk = jnp.take_along_axis(chunk_Bk, place_Bk // chunk, axis=1)
    return value_Bk, of_Bk * chunk + place_Bk % chunk

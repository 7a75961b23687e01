"""Products of blocks of rows with the matrices of their experts, and their gradients.

A block has rows of one expert. The number of blocks with rows is known only at run time; the other
blocks are not multiplied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from m4.model.product import input_gradient, weight_gradient

Array = jax.Array

_AT_ONCE = (4, 2, 1)  # blocks in a backward product; maximum of left-over blocks
# `lax.ragged_dot` has no other batching rule; a batch may be the rows of a Jacobian.
_in_a_loop = jax.custom_batching.sequential_vmap


@jax.custom_vjp
def grouped_matmul(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    """Multiplies each block by its expert's matrix.

    On CPUs, it is a loop over `count` blocks. On TPUs, it is megablox' kernel or the compiler's for
    `lax.ragged_dot`. On GPUs, it is one product of all blocks with copies of their matrices if the
    copies are small, and otherwise `lax.ragged_dot`, which is a dense expansion there.

    Args:
        expert_N: The expert of each block, ascending; E for blocks without rows.
        count: Number of blocks with rows; they come first.

    Returns:
        [N, b, F], with 0 in blocks without rows.
    """
    return lax.platform_dependent(
        x_NbM, w_EMF, expert_N, count, cpu=_loop, cuda=_on_gpu, default=_grouped
    )


def _backward(saved, d_NbF: Array):
    d_x_NbM, d_w_EMF = lax.platform_dependent(
        *saved, d_NbF, cpu=_loop_backward, cuda=_on_gpu_backward, default=_grouped_backward
    )
    return d_x_NbM, d_w_EMF, None, None


grouped_matmul.defvjp(lambda *given: (grouped_matmul(*given), given), _backward)


def _loop(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    N, b, _ = x_NbM.shape

    def expert(e: Array, begin: Array, end: Array, y_NbF: Array) -> Array:
        w_MF = _at(w_EMF, e)

        def turn(n: Array, y_NbF: Array) -> Array:
            return _put(y_NbF, jnp.dot(_at(x_NbM, n), w_MF), n)

        return lax.fori_loop(begin, end, turn, y_NbF)

    start = zeros_as((N, b, w_EMF.shape[-1]), x_NbM)
    return _by_expert(expert, start, expert_N, count, w_EMF.shape[0])


def _loop_backward(
    x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array, d_NbF: Array
) -> tuple[Array, Array]:
    """Computes the gradients of `_loop`, several blocks of an expert in one product."""
    # `_loop` must not do this: a row's result would depend on the number of its expert's rows.

    def expert(e: Array, begin: Array, end: Array, sums: tuple[Array, Array]):
        d_x_NbM, d_w_EMF = sums
        w_MF = _at(w_EMF, e)

        def turn(several: int, first: Array, i: Array, sums: tuple[Array, Array]):
            (d_x_NbM, d_w_MF), n = sums, first + i * several
            x_RM, d_RF = (_rows(blocks, n, several) for blocks in (x_NbM, d_NbF))
            d_x_RM = input_gradient(d_RF, w_MF)
            d_x_NbM = lax.dynamic_update_slice_in_dim(
                d_x_NbM, d_x_RM.reshape(several, *d_x_NbM.shape[1:]), n, 0
            )
            return d_x_NbM, d_w_MF + weight_gradient(x_RM, d_RF)

        sums = d_x_NbM, zeros_as(w_MF.shape, w_MF)
        for several in (many for many in _AT_ONCE if many <= x_NbM.shape[0]):
            turns = (end - begin) // several
            sums = lax.fori_loop(0, turns, functools.partial(turn, several, begin), sums)
            begin = begin + turns * several
        d_x_NbM, d_w_MF = sums
        return d_x_NbM, _put(d_w_EMF, d_w_MF, e)

    start = (zeros_as(x_NbM.shape, x_NbM), zeros_as(w_EMF.shape, w_EMF))
    return _by_expert(expert, start, expert_N, count, w_EMF.shape[0])


def _by_expert(expert, state, expert_N: Array, count: Array, E: int):
    """Applies expert(e, first block, end of its blocks, state) -> state to experts with blocks."""
    N = expert_N.shape[0]
    before_N = jnp.pad(expert_N, (1, 0), constant_values=-1)[:-1]
    first_N = (expert_N != before_N) & (jnp.arange(N) < count)
    begin_X = jnp.nonzero(first_N, size=min(E, N), fill_value=count)[0]
    end_X = jnp.append(begin_X[1:], count)

    def turn(i: Array, state):
        return expert(expert_N[begin_X[i]], begin_X[i], end_X[i], state)

    return lax.fori_loop(0, jnp.sum(first_N), turn, state)


_COPIES_BYTES = 2**28  # at most in `_with_copies`: 0.1 ms of an H100's memory


def _copies_fit(x_NbM: Array, w_EMF: Array) -> bool:
    return x_NbM.shape[0] * w_EMF[0].size * w_EMF.dtype.itemsize <= _COPIES_BYTES


def _on_gpu(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    if not _copies_fit(x_NbM, w_EMF):
        return _grouped(x_NbM, w_EMF, expert_N, count)
    return _with_copies(x_NbM, w_EMF, expert_N)


def _on_gpu_backward(
    x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array, d_NbF: Array
) -> tuple[Array, Array]:
    if not _copies_fit(x_NbM, w_EMF):
        return _grouped_backward(x_NbM, w_EMF, expert_N, count, d_NbF)
    _, gradients = jax.vjp(lambda x, w: _with_copies(x, w, expert_N), x_NbM, w_EMF)
    return gradients(d_NbF)


def _with_copies(x_NbM: Array, w_EMF: Array, expert_N: Array) -> Array:
    w_NMF = w_EMF.at[expert_N].get(mode="fill", fill_value=0)  # E, without rows: zeros
    x_NbM = jnp.where((expert_N < w_EMF.shape[0])[:, None, None], x_NbM, 0)
    return jnp.einsum("NbM,NMF->NbF", x_NbM, w_NMF)


@_in_a_loop
def _grouped(x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array) -> Array:
    del count  # blocks without rows have no expert
    if not _megablox_fits(x_NbM, w_EMF):
        return _ragged(x_NbM, w_EMF, expert_N)
    return _megablox(x_NbM, w_EMF, expert_N)


@_in_a_loop
def _grouped_backward(
    x_NbM: Array, w_EMF: Array, expert_N: Array, count: Array, d_NbF: Array
) -> tuple[Array, Array]:
    del count
    there_N11 = (expert_N < w_EMF.shape[0])[:, None, None]
    d_NbF = jnp.where(there_N11, d_NbF, 0)
    if not _megablox_fits(x_NbM, w_EMF):
        _, gradients = jax.vjp(lambda x, w: _ragged(x, w, expert_N), x_NbM, w_EMF)
        d_x_NbM, d_w_EMF = gradients(d_NbF)
        return jnp.where(there_N11, d_x_NbM, 0), d_w_EMF
    return _megablox_backward(x_NbM, w_EMF, expert_N, d_NbF)


def _ragged(x_NbM: Array, w_EMF: Array, expert_N: Array) -> Array:
    N, b, M = x_NbM.shape
    E, F = w_EMF.shape[0], w_EMF.shape[-1]
    y_PF = lax.ragged_dot(x_NbM.reshape(N * b, M), w_EMF, _sizes(expert_N, E, b))
    # A ragged product leaves the results of rows outside all experts undefined.
    return jnp.where((expert_N < E)[:, None, None], y_PF.reshape(N, b, F), 0)


def _sizes(expert_N: Array, E: int, b: int) -> Array:
    """Returns the number of rows of each expert."""
    return b * jnp.sum(expert_N[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)


def _megablox_fits(x_NbM: Array, w_EMF: Array) -> bool:
    """Returns whether megablox' kernel has tiles for these shapes on the mesh's devices.

    Otherwise, and if the partitioner splits the kernel's operands, `lax.ragged_dot` is used.
    TPUs before v4 refuse the kernel in bfloat16.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    whole = all(mesh.shape[name] == 1 for name in mesh.auto_axes)
    sublanes = 8 * 4 // x_NbM.dtype.itemsize
    tiles = x_NbM.shape[1] % sublanes == 0 and not any(n % _LANES for n in w_EMF.shape[1:])
    known = kind.startswith("TPU") and (x_NbM.dtype != jnp.bfloat16 or kind not in _OLD)
    return known and whole and tiles


_OLD = ("TPU v2", "TPU v3")
_LANES, _TILE_BYTES = 128, 2**21  # maximum bytes of the matrices' tiles in a TPU's vector memory


def _megablox(x_NbM: Array, w_EMF: Array, expert_N: Array, *, interpret: bool = False) -> Array:
    """Multiplies by JAX's megablox kernel for grouped products; a block is a tile of rows."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # takes a second to import

    N, b, M = x_NbM.shape
    E, _, F = w_EMF.shape
    y_PF = gmm(
        x_NbM.reshape(N * b, M),
        w_EMF,
        _sizes(expert_N, E, b),
        preferred_element_type=x_NbM.dtype,
        tiling=_tiles(b, M, F, x_NbM.dtype.itemsize),
        interpret=interpret,
    )
    return jnp.where((expert_N < E)[:, None, None], y_PF.reshape(N, b, F), 0)


def _megablox_backward(
    x_NbM: Array, w_EMF: Array, expert_N: Array, d_NbF: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    N, b, M = x_NbM.shape
    E, _, F = w_EMF.shape
    size_E, itemsize = _sizes(expert_N, E, b), x_NbM.dtype.itemsize
    d_PF = d_NbF.reshape(N * b, F)
    d_x_PM = gmm(
        *(d_PF, w_EMF, size_E, x_NbM.dtype),
        tiling=_tiles(b, F, M, itemsize),
        transpose_rhs=True,
        interpret=interpret,
    )
    d_w_EMF = tgmm(
        *(x_NbM.reshape(N * b, M).T, d_PF, size_E, w_EMF.dtype),
        tiling=_tiles(b, M, F, 4),  # sums are float32
        interpret=interpret,
    )
    d_x_NbM = d_x_PM.reshape(x_NbM.shape)
    return jnp.where((expert_N < E)[:, None, None], d_x_NbM, 0), d_w_EMF


def _tiles(rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int, int]:
    """Returns tile sizes of the rows, of the summed axis, and of the result's axis.

    A matrix that is whole along the second is not read again for the expert's next block.
    """
    out = _divisor(outer, 512)
    return rows, _divisor(inner, _TILE_BYTES // (out * itemsize)), out


def _divisor(size: int, most: int) -> int:
    """Returns the largest multiple of _LANES, at most `most`, that divides `size`."""
    return next(n for n in range(most // _LANES * _LANES, 0, -_LANES) if size % n == 0)


def zeros_as(shape: tuple[int, ...], like: Array) -> Array:
    """Returns zeros of the type of `like`, which vary over the same mesh axes.

    In a manual region a loop's state must vary over the same axes from the start, which a constant
    does not.
    """
    return jnp.broadcast_to(jnp.where(False, like[(0,) * like.ndim], 0), shape)


def _at(array: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _rows(x_NbM: Array, n: Array, several: int) -> Array:
    """Returns the rows of `several` blocks from the n-th on."""
    _, b, M = x_NbM.shape
    return lax.dynamic_slice_in_dim(x_NbM, n, several).reshape(several * b, M)


def _put(array: Array, part: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(array, part, index, 0)

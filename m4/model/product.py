"""Matrix products, and their gradients, written so that XLA's CPU library is fast.

The weight's gradient is x^T dy. Automatic differentiation writes it as (dy^T x)^T, which takes up
to twice the time; so does the input's, dy w^T, where few rows meet a large weight, and x w itself
where that weight is an expert's. (docs/performance.md, "Matrix products".)
"""

import math

import jax
import jax.numpy as jnp

Array = jax.Array

# Numbers of an expert's weight from which on x^T is written down: faster with 2048 x 512, slower
# with 1024 x 256 (docs/performance.md, "Matrix products").
_LARGE = 2**20

_CACHE_LINE = 64  # bytes


@jax.custom_vjp
def product(x: Array, w_KN: Array) -> Array:
    """x [..., K] times w [K, N] -> [..., N]."""
    return jnp.dot(x, w_KN)


def _product_forward(x: Array, w_KN: Array):
    return jnp.dot(x, w_KN), (x, w_KN)


def _product_backward(saved, d: Array):
    x, w_KN = saved
    rows_x, rows_d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
    return input_gradient(d, w_KN), weight_gradient(rows_x, rows_d)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def expert_product(x_EGCM: Array, w_EMF: Array) -> Array:
    """Each expert's rows times its own matrix: [E, G, C, M], [E, M, F] -> [E, G, C, F]."""

    def as_it_comes(x_EGCM: Array, w_EMF: Array) -> Array:
        return jnp.einsum("EGCM,EMF->EGCF", x_EGCM, w_EMF)

    # Measured to be faster where w is large.
    def written_down(x_EGCM: Array, w_EMF: Array) -> Array:
        E, G, C, M = x_EGCM.shape
        x_EMR = jax.lax.optimization_barrier(jnp.swapaxes(x_EGCM.reshape(E, G * C, M), 1, 2))
        result_ERF = jax.lax.dot_general(x_EMR, w_EMF, (((1,), (1,)), ((0,), (0,))))
        return result_ERF.reshape(E, G, C, -1)

    _, G, C, _ = x_EGCM.shape
    _, M, F = w_EMF.shape
    if M * F < _LARGE or not _few_rows(G * C, M, F):
        return as_it_comes(x_EGCM, w_EMF)
    return jax.lax.platform_dependent(x_EGCM, w_EMF, cpu=written_down, default=as_it_comes)


def _expert_forward(x_EGCM: Array, w_EMF: Array):
    return expert_product(x_EGCM, w_EMF), (x_EGCM, w_EMF)


def _expert_backward(saved, d_EGCF: Array):
    x_EGCM, w_EMF = saved
    E, _, _, M = x_EGCM.shape
    rows_x, rows_d = x_EGCM.reshape(E, -1, M), d_EGCF.reshape(E, -1, d_EGCF.shape[-1])
    return input_gradient(d_EGCF, w_EMF), weight_gradient(rows_x, rows_d)


expert_product.defvjp(_expert_forward, _expert_backward)


@jax.custom_vjp
def tied_logits(x_BTM: Array, embedding_VM: Array) -> Array:
    """x E^T: [B, T, M], [V, M] -> [B, T, V]."""
    return jnp.einsum("BTM,VM->BTV", x_BTM, embedding_VM)


def _tied_forward(x_BTM: Array, embedding_VM: Array):
    return tied_logits(x_BTM, embedding_VM), (x_BTM, embedding_VM)


def _tied_backward(saved, d_BTV: Array):
    x_BTM, embedding_VM = saved
    rows_x, rows_d = x_BTM.reshape(-1, x_BTM.shape[-1]), d_BTV.reshape(-1, d_BTV.shape[-1])
    d_x = jnp.einsum("BTV,VM->BTM", d_BTV, embedding_VM)
    # The barrier keeps XLA from folding the transpose into the product, which is slower on CPUs.
    return d_x, jax.lax.optimization_barrier(weight_gradient(rows_x, rows_d)).T


tied_logits.defvjp(_tied_forward, _tied_backward)


def input_gradient(d: Array, w: Array) -> Array:
    """d w^T: [(E,) ..., N], [(E,) K, N] -> [(E,) ..., K]."""
    batch = tuple(range(w.ndim - 2))  # the experts' axis, if any

    def as_it_comes(d: Array, w: Array) -> Array:
        dimensions = ((d.ndim - 1,), (w.ndim - 1,)), (batch, batch)
        return jax.lax.dot_general(d, w, dimensions)

    # XLA's CPU library rearranges the right side. Where rows are few that had better not be w.
    def turned(d: Array, w: Array) -> Array:
        dimensions = ((w.ndim - 1,), (d.ndim - 1,)), (batch, batch)
        result = jax.lax.optimization_barrier(jax.lax.dot_general(w, d, dimensions))
        return jnp.moveaxis(result, w.ndim - 2, -1)

    rows = math.prod(d.shape[len(batch) : -1])
    if not _few_rows(rows, *w.shape[-2:]):
        return as_it_comes(d, w)
    return jax.lax.platform_dependent(d, w, cpu=turned, default=as_it_comes)


def weight_gradient(x: Array, d: Array) -> Array:
    """x^T d over the rows: [(E,) rows, K], [(E,) rows, N] -> [(E,) K, N]."""

    def as_it_comes(x: Array, d: Array) -> Array:
        return jnp.einsum("...RK,...RN->...KN", x, d)

    # XLA's CPU library reads the columns of the wider side. Where its rows are an even number of
    # cache lines, a column's numbers share few of the cache's sets and push each other out: a line
    # more spreads them. (The barrier keeps XLA from taking the zeros out again.)
    def padded(x: Array, d: Array) -> Array:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, line)]
        x = jax.lax.optimization_barrier(jnp.pad(x, widths))
        return as_it_comes(x, d)[..., :K, :]

    rows, K, N = x.shape[-2], x.shape[-1], d.shape[-1]
    line = _CACHE_LINE // x.dtype.itemsize  # numbers in one
    if K <= N or K % (2 * line) or _few_rows(rows, K, N):
        return as_it_comes(x, d)
    return jax.lax.platform_dependent(x, d, cpu=padded, default=as_it_comes)


def _few_rows(rows: int, K: int, N: int) -> bool:
    """Whether x [rows, K] and y [rows, N], of all devices, have fewer numbers than w [K, N]."""
    return rows * (K + N) < K * N

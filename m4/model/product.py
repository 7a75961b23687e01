"""Matrix products whose weight's gradient is written so that XLA's CPU library is fast.

Automatic differentiation writes x^T dy as (dy^T x)^T, which takes up to twice the time on a CPU
(docs/performance.md, "Matrix products").
"""

import jax
import jax.numpy as jnp

Array = jax.Array

_CACHE_LINE = 64  # bytes


@jax.custom_vjp
def product(x: Array, w_MF: Array) -> Array:
    """x [..., M] times w [M, F] -> [..., F]."""
    return jnp.dot(x, w_MF)


def _product_forward(x: Array, w_MF: Array):
    return jnp.dot(x, w_MF), (x, w_MF)


def _product_backward(saved, d: Array):
    x, w_MF = saved
    rows_x, rows_d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
    return input_gradient(d, w_MF), weight_gradient(rows_x, rows_d)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def expert_product(x_EGCM: Array, w_EMF: Array) -> Array:
    """Each expert's rows times its own matrix: [E, G, C, M], [E, M, F] -> [E, G, C, F]."""
    return jnp.einsum("EGCM,EMF->EGCF", x_EGCM, w_EMF)


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
    """d w^T: [(E,) ..., F], [(E,) M, F] -> [(E,) ..., M]."""
    batch = tuple(range(w.ndim - 2))  # the experts' axis, if any
    return jax.lax.dot_general(d, w, (((d.ndim - 1,), (w.ndim - 1,)), (batch, batch)))


def weight_gradient(x: Array, d: Array) -> Array:
    """x^T d over the rows: [(E,) S, M], [(E,) S, F] -> [(E,) M, F]."""

    def as_it_comes(x: Array, d: Array) -> Array:
        return jnp.einsum("...SM,...SF->...MF", x, d)

    # XLA's CPU library reads the columns of the wider side. Where its rows are an even number of
    # cache lines, a column's numbers share few of the cache's sets and push each other out: a line
    # more spreads them. (The barrier keeps XLA from taking the zeros out again.)
    def padded(x: Array, d: Array) -> Array:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, line)]
        x = jax.lax.optimization_barrier(jnp.pad(x, widths))
        return as_it_comes(x, d)[..., :M, :]

    S, M, F = x.shape[-2], x.shape[-1], d.shape[-1]
    line = _CACHE_LINE // x.dtype.itemsize  # numbers in one
    few_rows = S * (M + F) < M * F  # fewer numbers in x and d than in the gradient
    if M <= F or M % (2 * line) or few_rows:
        return as_it_comes(x, d)
    return jax.lax.platform_dependent(x, d, cpu=padded, default=as_it_comes)

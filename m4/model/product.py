"""Matrix products in full precision, with gradients that are fast on CPUs.

Precision: the products of the router and of the vocabulary's logits, and their gradients, ask for
`FULL`, full float32 precision on every platform. Otherwise TPUs round float32 operands to bfloat16
and recent GPUs to TF32. The product of two bfloat16 numbers is exact in float32, so for bfloat16
operands a float32 result is enough.

Gradients: automatic differentiation writes x^T dy as (dy^T x)^T, which takes up to twice the time
on a CPU (docs/lab/2026-11-23-performance.md, "Matrix products").
"""

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Precision = jax.lax.Precision | None  # None means the platform's default

FULL = jax.lax.Precision.HIGHEST
_CACHE_LINE = 64  # bytes


def full_product(spec: str, *operands: Array) -> Array:
    """Computes `jnp.einsum` in full float32 precision."""
    return jnp.einsum(spec, *operands, precision=FULL, preferred_element_type=jnp.float32)


def product(x: Array, w: Array, precision: Precision = None) -> Array:
    """Multiplies rows by a matrix, [..., M] by [M, F], or each expert's rows by its own matrix.

    For experts, the shapes are [E, G, C, M] by [E, M, F] -> [E, G, C, F].
    """
    result: Any = _product(x, w, precision)  # custom_vjp hides the type of the function
    return result


def _multiply(x: Array, w: Array, precision: Precision) -> Array:
    if w.ndim == 2:
        return jnp.dot(x, w, precision=precision)
    return jnp.einsum("EGCM,EMF->EGCF", x, w, precision=precision)


def _multiply_backward(precision: Precision, saved, d: Array):
    x, w = saved
    rows_x, rows_d = (rows.reshape(*w.shape[:-2], -1, rows.shape[-1]) for rows in (x, d))
    return input_gradient(d, w, precision), weight_gradient(rows_x, rows_d, precision)


_product = jax.custom_vjp(_multiply, nondiff_argnums=(2,))
# The forward rule must show the bare product: a rematerialization policy does not look inside
# calls of `_product`, and "products" would keep nothing.
_product.defvjp(lambda x, w, precision: (_multiply(x, w, precision), (x, w)), _multiply_backward)


@jax.custom_vjp
def tied_logits(x_BTM: Array, embedding_VM: Array) -> Array:
    """Returns x E^T: [B, T, M], [V, M] -> float32 [B, T, V]; gradients have the operands' type."""
    return full_product("BTM,VM->BTV", x_BTM, embedding_VM)


def _tied_backward(saved, d_BTV: Array):
    x_BTM, embedding_VM = saved
    d_BTV = d_BTV.astype(x_BTM.dtype)
    rows_x, rows_d = x_BTM.reshape(-1, x_BTM.shape[-1]), d_BTV.reshape(-1, d_BTV.shape[-1])
    d_x = jnp.einsum("BTV,VM->BTM", d_BTV, embedding_VM, precision=FULL)
    # The barrier keeps XLA from folding the transpose into the product, which is slower on CPUs.
    return d_x, jax.lax.optimization_barrier(weight_gradient(rows_x, rows_d, FULL)).T


tied_logits.defvjp(lambda *given: (tied_logits(*given), given), _tied_backward)


def input_gradient(d: Array, w: Array, precision: Precision = None) -> Array:
    """Returns d w^T: [(E,) ..., F], [(E,) M, F] -> [(E,) ..., M]."""
    batch = tuple(range(w.ndim - 2))  # the experts' axis, if any
    axes = ((d.ndim - 1,), (w.ndim - 1,)), (batch, batch)
    return jax.lax.dot_general(d, w, axes, precision=precision)


def weight_gradient(x: Array, d: Array, precision: Precision = None) -> Array:
    """Returns x^T d, summed over the rows: [(E,) S, M], [(E,) S, F] -> [(E,) M, F]."""

    def plain(x: Array, d: Array) -> Array:
        return jnp.einsum("...SM,...SF->...MF", x, d, precision=precision)

    # XLA's CPU library reads the columns of the wider side. If its rows are an even number of cache
    # lines long, the numbers of a column share few sets of the cache and evict each other; one more
    # line spreads them. (The barrier keeps XLA from removing the zeros.)
    def padded(x: Array, d: Array) -> Array:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, line)]
        x = jax.lax.optimization_barrier(jnp.pad(x, widths))
        return plain(x, d)[..., :M, :]

    S, M, F = x.shape[-2], x.shape[-1], d.shape[-1]
    line = _CACHE_LINE // x.dtype.itemsize  # numbers in a cache line
    few_rows = S * (M + F) < M * F  # if x and d have fewer numbers than the gradient
    if M <= F or M % (2 * line) or few_rows:
        return plain(x, d)
    return jax.lax.platform_dependent(x, d, cpu=padded, default=plain)

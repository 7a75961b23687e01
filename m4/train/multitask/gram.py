"""Gram matrices of groups' gradients, and weighted sums of the gradients, by part of a model.

A stacked gradient has a first axis G that counts the groups, in every array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from m4.train.optimizer import is_stacked

Array = jax.Array
# Parts of a model whose gradients are compared: all of it, each layer, each parameter.
GRANULARITIES = ("model", "layer", "matrix")


def parts(params: Any, granularity: str) -> tuple[int, list[tuple[slice, bool]]]:
    """Divides a model's parameters into parts.

    Returns:
        The number of parts; and of each parameter the slice of its parts, with True where that has
        a part for each layer, because the parameter is of a scanned stack and its first axis counts
        layers.
    """
    numbers: dict[str, slice] = {}
    found, count = [], 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [str(key.key) for key in path]
        layers = granularity != "model" and is_stacked(path)
        if granularity != "matrix":
            names = names[: 1 + layers] if granularity == "layer" else []
        name = "/".join(names)
        if name not in numbers:
            numbers[name] = slice(count, count := count + (leaf.shape[0] if layers else 1))
        found.append((numbers[name], layers))
    return count, found


def gram(stacked: Any, granularity: str) -> Array:
    """Returns the groups' inner products in each part, float32 [parts, G, G]."""
    count, where = _parts_of_stacked(stacked, granularity)
    leaves = jax.tree.leaves(stacked)
    sums = jnp.zeros((count, *[leaves[0].shape[0]] * 2), jnp.float32)
    for (part, layers), x_G in zip(where, leaves, strict=True):
        first = 2 if layers else 1
        inside = tuple(range(first, x_G.ndim))
        batch = (1,) if layers else ()
        product = jax.lax.dot_general(
            x_G,
            x_G,
            ((inside, inside), (batch, batch)),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        sums = sums.at[part].add(product if layers else product[None])
    return sums


def weighted(stacked: Any, weights: Array, granularity: str) -> Any:
    """Adds up the groups' gradients with the weights [parts, G]."""
    leaves, treedef = jax.tree.flatten(stacked)
    found = []
    for w_nG, x_G in zip(by_parameter(stacked, weights, granularity), leaves, strict=True):
        found.append(jnp.sum(spread(w_nG, x_G) * x_G, axis=0))
    return jax.tree.unflatten(treedef, found)


def by_parameter(stacked: Any, weights: Array, granularity: str) -> Iterator[Array]:
    """Yields each parameter's weights, [n, G]: n layers of a scanned stack, else 1."""
    for part, _ in _parts_of_stacked(stacked, granularity)[1]:
        yield weights[part]


def spread(w_nG: Array, x_G: Array) -> Array:
    """Returns a parameter's weights in a shape that multiplies its stacked gradient."""
    if x_G.ndim == 1:
        return w_nG[0]
    return w_nG.T.reshape(*w_nG.T.shape, *[1] * (x_G.ndim - 2))


def _parts_of_stacked(stacked: Any, granularity: str) -> tuple[int, list[tuple[slice, bool]]]:
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
    return parts(first, granularity)

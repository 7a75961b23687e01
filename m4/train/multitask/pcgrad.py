"""PCGrad: a group's gradient loses what works against another group's."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.settings import OneOf, checked
from m4.train.multitask.gram import GRANULARITIES
from m4.train.multitask.groups import Grouping, by_level

Array = jax.Array


@checked
@dataclasses.dataclass(frozen=True)
class PCGrad:
    """Projects conflicting gradients (Yu et al. 2020, arXiv 2001.06782, Algorithm 1).

    For each group i, in a random order of the others j: where g_i . g_j < 0, g_i -= (g_i . g_j) /
    |g_j|^2 g_j, with the g_i as altered so far and the g_j as it came. The step's gradient is the
    sum of the g_i. Groups without tokens in the batch take no part.

    Attributes:
        groups: directions -> groups (`m4.train.multitask.groups`).
        granularity: "model", as the paper, or each "layer" or "matrix" by itself.
    """

    groups: Grouping = by_level
    granularity: Annotated[str, OneOf(GRANULARITIES)] = "model"

    def begin(self, groups: int) -> Array:
        """The state of a part of the model: none."""
        del groups
        return jnp.zeros(0)

    def weights(self, gram_GG: Array, state: Array, key: Array) -> tuple[Array, Array]:
        """Gram matrix of a part, state, key of the order -> (weight of each g_j in the step's
        gradient, new state)."""

        def altered(i: Array) -> Array:
            def visit(c_G: Array, j: Array) -> tuple[Array, None]:
                dot, square = jnp.sum(c_G * gram_GG[:, j]), gram_GG[j, j]
                conflict = (j != i) & (dot < 0) & (square > 0)
                moved = jnp.where(conflict, -dot / jnp.where(conflict, square, 1.0), 0.0)
                return c_G.at[j].add(moved), None

            return jax.lax.scan(visit, start_GG[i], order_of(key, i, len(gram_GG)))[0]

        # The altered g_i is the sum of c_j g_j: all that is needed of it is c.
        start_GG = jnp.eye(len(gram_GG), dtype=gram_GG.dtype)
        return jnp.sum(jax.vmap(altered)(jnp.arange(len(gram_GG))), axis=0), state


def order_of(key: Array, i: Array, groups: int) -> Array:
    """The order in which group i looks at the groups."""
    return jax.random.permutation(jax.random.fold_in(key, i), groups)

"""Gradient surgery: PCGrad and Gradient Vaccine alter groups' gradients to reduce conflicts.

The altered gradient of a group is a sum of all groups' gradients, so that the Gram matrix is all
that a method needs and one weight a group is its result.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.settings import Between, OneOf, checked
from m4.train.multitask.grouped import GRANULARITIES
from m4.train.multitask.groups import Grouping, by_level

Array = jax.Array
Granularity = Annotated[str, OneOf(GRANULARITIES)]
_BELOW_ONE = 1.0 - 1e-6  # largest target cosine: no finite step reaches 1


def order_of(key: Array, i: Array, groups: int) -> Array:
    """Returns the order in which group i looks at the groups."""
    return jax.random.permutation(jax.random.fold_in(key, i), groups)


@checked
@dataclasses.dataclass(frozen=True)
class PCGrad:
    """Projects conflicting gradients (Yu et al. 2020, arXiv 2001.06782, Algorithm 1).

    For each group i, in a random order of the others j: where g_i . g_j < 0, g_i -= (g_i . g_j) /
    |g_j|^2 g_j, with g_i as altered so far and the original g_j. The step's gradient is the sum of
    the g_i. Groups without tokens in the batch take no part.

    Attributes:
        groups: Grouping of directions (`m4.train.multitask.groups`).
        granularity: "model" as in the paper, or each "layer" or "matrix" by itself.
    """

    groups: Grouping = by_level
    granularity: Granularity = "model"

    def initial_state(self, groups: int) -> Array:
        """Returns an empty array: PCGrad has no state."""
        del groups
        return jnp.zeros(0)

    def weights(self, gram_GG: Array, state: Array, key: Array) -> tuple[Array, Array]:
        """Returns the weight of each g_j in the step's gradient, and the state."""
        groups = len(gram_GG)

        def altered(i: Array) -> Array:
            def visit(c_G: Array, j: Array) -> tuple[Array, None]:
                dot, square = jnp.sum(c_G * gram_GG[:, j]), gram_GG[j, j]
                conflict = (j != i) & (dot < 0) & (square > 0)
                moved = jnp.where(conflict, -dot / jnp.where(conflict, square, 1.0), 0.0)
                return c_G.at[j].add(moved), None

            return jax.lax.scan(visit, start_GG[i], order_of(key, i, groups))[0]

        # The altered g_i is the sum of c_j g_j.
        start_GG = jnp.eye(groups, dtype=gram_GG.dtype)
        return jnp.sum(jax.vmap(altered)(jnp.arange(groups)), axis=0), state


@checked
@dataclasses.dataclass(frozen=True)
class GradientVaccine:
    """Turns gradients towards their usual cosines.

    Source: Gradient Vaccine, Wang et al. 2021 (arXiv 2010.05874), Algorithm 1.

    For each group i, in a random order of the others j, and for each part of the model: phi is the
    cosine of g_i, as altered so far, and g_j. Where phi is below its target t,

        g_i += |g_i| (t sqrt(1 - phi^2) - phi sqrt(1 - t^2)) / (|g_j| sqrt(1 - t^2)) g_j

    after which the cosine is t. Then t = (1 - beta) t + beta phi, starting at 0; at t = 0 it is
    PCGrad. The step's gradient is the sum of the g_i. Groups without tokens in the batch take no
    part, and their targets stay. The targets are in checkpoints.

    Attributes:
        groups: Grouping of directions (`m4.train.multitask.groups`).
        granularity: Parts of the model: "model", each "layer" or each "matrix" (the paper's
            whole_model, all_layer, all_matrix).
        beta: Rate of the moving average; at 0 the targets stay 0.
    """

    groups: Grouping = by_level
    granularity: Granularity = "layer"
    beta: Annotated[float, Between(0, 1)] = 0.01

    def initial_state(self, groups: int) -> Array:
        """Returns the targets [G, G] of a part of the model."""
        return jnp.zeros((groups, groups))

    def weights(self, gram_GG: Array, state: Array, key: Array) -> tuple[Array, Array]:
        """Returns the weight of each g_j in the step's gradient, and the new targets [G, G]."""
        groups = len(gram_GG)
        present_G = jnp.diagonal(gram_GG) > 0

        def altered(i: Array, target_G: Array) -> tuple[Array, Array]:
            def visit(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], None]:
                c_G, target_G = carry
                here = (j != i) & present_G[i] & present_G[j]
                # Sums, because matrix products have fewer digits on accelerators.
                square = jnp.sum(c_G[:, None] * gram_GG * c_G[None])
                own = jnp.sqrt(jnp.maximum(square, 0.0))
                other = jnp.sqrt(gram_GG[j, j])
                here &= own > 0
                product = jnp.where(here, own * other, 1.0)
                phi = jnp.clip(jnp.sum(c_G * gram_GG[:, j]) / product, -1.0, 1.0)
                t = jnp.minimum(target_G[j], _BELOW_ONE)
                sine = jnp.sqrt(1 - t * t)
                turned = own * (t * jnp.sqrt(1 - phi * phi) - phi * sine)
                turned = turned / (jnp.where(here, other, 1.0) * sine)
                c_G = c_G.at[j].add(jnp.where(here & (phi < t), turned, 0.0))
                moved = (1 - self.beta) * target_G[j] + self.beta * phi
                return (c_G, target_G.at[j].set(jnp.where(here, moved, target_G[j]))), None

            start = jnp.zeros(groups, gram_GG.dtype).at[i].set(1.0), target_G
            return jax.lax.scan(visit, start, order_of(key, i, groups))[0]

        coefficients, targets = jax.vmap(altered)(jnp.arange(groups), state)
        return jnp.sum(coefficients, axis=0), targets

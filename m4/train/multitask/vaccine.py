"""Gradient Vaccine: groups' gradients are turned towards the cosines that they usually have."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.settings import Between, OneOf, checked
from m4.train.multitask.gram import GRANULARITIES
from m4.train.multitask.groups import Grouping, by_level
from m4.train.multitask.pcgrad import order_of

Array = jax.Array
_BELOW_ONE = 1.0 - 1e-6  # of a target: at 1 no finite step reaches it


@checked
@dataclasses.dataclass(frozen=True)
class GradientVaccine:
    """Gradient Vaccine (Wang et al. 2021, arXiv 2010.05874, Algorithm 1).

    For each group i, in a random order of the others j, and each part of the model: phi is the
    cosine of g_i, as altered so far, and g_j as it came. Where phi is below its target t,

        g_i += |g_i| (t sqrt(1 - phi^2) - phi sqrt(1 - t^2)) / (|g_j| sqrt(1 - t^2)) g_j

    after which the cosine is t. Then t = (1 - beta) t + beta phi, from 0 on: at t = 0 it is PCGrad.
    The step's gradient is the sum of the g_i. Groups without tokens in the batch take no part, and
    their targets stay. The targets are in checkpoints.

    Attributes:
        groups: directions -> groups (`m4.train.multitask.groups`).
        granularity: the parts: "model", each "layer", or each "matrix" (the paper's whole_model,
            all_layer, all_matrix).
        beta: of the moving average; 0: the targets stay 0.
    """

    groups: Grouping = by_level
    granularity: Annotated[str, OneOf(GRANULARITIES)] = "layer"
    beta: Annotated[float, Between(0, 1)] = 0.01

    def begin(self, groups: int) -> Array:
        """The targets [G, G] of a part of the model."""
        return jnp.zeros((groups, groups))

    def weights(self, gram_GG: Array, state: Array, key: Array) -> tuple[Array, Array]:
        """Gram matrix of a part, targets, key of the order -> (weight of each g_j in the step's
        gradient, new targets)."""
        groups = len(gram_GG)
        present_G = jnp.diagonal(gram_GG) > 0

        def altered(i: Array, target_G: Array) -> tuple[Array, Array]:
            def visit(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], None]:
                c_G, target_G = carry
                here = (j != i) & present_G[i] & present_G[j]
                # Sums, not products of matrices: those have fewer digits on accelerators.
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

"""Gradients of sets of directions, and methods that alter them to reduce conflicts.

The altered gradient of a set is a weighted sum of all sets' gradients, so a method needs only the
Gram matrix and returns one weight per set. In a stacked gradient, the first axis G of each array
counts the sets.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp

from m4.model.layers import names_of
from m4.settings import Between, OneOf, checked
from m4.train.multitask.groups import Grouping, by_level
from m4.train.optimizer import is_stacked

Array = jax.Array
# Parts of a model whose gradients are compared: all of it, each layer, each parameter.
Granularity = Annotated[str, OneOf(("model", "layer", "matrix"))]
_BELOW_ONE = 1.0 - 1e-6  # largest target cosine: no finite step reaches 1


class Surgery(Protocol):
    """A method that alters groups' gradients to reduce conflicts (`PCGrad`, `GradientVaccine`)."""

    groups: Any  # Grouping
    granularity: Any  # str

    def initial_state(self, groups: int) -> Array | None: ...
    def weights(self, gram_GG: Array, state: Any, key: Array) -> tuple[Array, Any]: ...


def order_of(key: Array, i: Array, groups: int) -> Array:
    """Returns the order in which group i looks at the groups."""
    return jax.random.permutation(jax.random.fold_in(key, i), groups)


@checked
@dataclasses.dataclass(frozen=True)
class PCGrad:
    """Projects conflicting gradients (Yu et al. 2020, arXiv 2001.06782, Algorithm 1).

    Each group i looks at the others j in a random order: where g_i . g_j < 0, g_i -= (g_i . g_j) /
    |g_j|^2 g_j, with g_i as altered so far and the original g_j. The step's gradient is the sum of
    the g_i. Groups without tokens in the batch take no part.

    Attributes:
        groups: Grouping of directions (`m4.train.multitask.groups`).
        granularity: "model" as in the paper, or each "layer" or "matrix" by itself.
    """

    groups: Grouping = by_level
    granularity: Granularity = "model"

    def initial_state(self, groups: int) -> None:
        """Returns None: PCGrad has no state."""

    def weights(self, gram_GG: Array, state: None, key: Array) -> tuple[Array, None]:
        """Returns the weight of each g_j in the step's gradient, and no state."""
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

    Each group i looks at the others j in a random order, in each part of the model. There phi is
    the cosine of g_i, as altered so far, and g_j. Where phi is below its target t,

        g_i += |g_i| (t sqrt(1 - phi^2) - phi sqrt(1 - t^2)) / (|g_j| sqrt(1 - t^2)) g_j

    after which the cosine is t. Then t = (1 - beta) t + beta phi, starting at 0; with t = 0 the
    method is PCGrad. The step's gradient is the sum of the g_i. Groups without tokens in the batch
    take no part, and their targets stay. Checkpoints hold the targets.

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


def gradients_of(
    loss_fn: Callable[..., tuple[Array, Any]], sets: int | None
) -> Callable[..., tuple[Any, Any]]:
    """Returns the function (params, ...) -> (gradients, metrics) of a loss.

    With a number of `sets`, the loss is an array [sets] and gradients are stacked. One pass goes
    forward and one backward per set, one after another, in the memory of one pass and the
    gradients.
    """
    if sets is None:
        return jax.grad(loss_fn, has_aux=True)

    def stacked(params: Any, *rest: Any) -> tuple[Any, Any]:
        _, pull, metrics = jax.vjp(lambda p: loss_fn(p, *rest), params, has_aux=True)
        return jax.lax.map(lambda one: pull(one)[0], jnp.eye(sets)), metrics

    return stacked


def parts(params: Any, granularity: str, axis: int = 0) -> tuple[int, list[tuple[slice, bool]]]:
    """Returns the number of a model's parts, and for each parameter (slice of its parts, scanned).

    `scanned` is True if the parameter has a part for each layer of a stack, along `axis`.
    """
    numbers: dict[str, slice] = {}
    found, count = [], 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = names_of(path)
        layers = granularity != "model" and is_stacked(path)
        if granularity != "matrix":
            names = names[: 1 + layers] if granularity == "layer" else []
        name = "/".join(names)
        if name not in numbers:
            numbers[name] = slice(count, count := count + (leaf.shape[axis] if layers else 1))
        found.append((numbers[name], layers))
    return count, found


def gram(stacked: Any, granularity: str) -> Array:
    """Returns the groups' inner products in each part, float32 [parts, G, G]."""
    count, where = parts(stacked, granularity, 1)
    leaves = jax.tree.leaves(stacked)
    sums = jnp.zeros((count, *[leaves[0].shape[0]] * 2), jnp.float32)
    for (part, layers), x_G in zip(where, leaves, strict=True):
        inside, batch = tuple(range(1 + layers, x_G.ndim)), (1,) if layers else ()
        product = jax.lax.dot_general(
            x_G, x_G, ((inside, inside), (batch, batch)), precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        sums = sums.at[part].add(product if layers else product[None])
    return sums


def weighted(stacked: Any, weights: Array, granularity: str) -> Any:
    """Returns the groups' gradients times the weights [parts, G]."""
    leaves, treedef = jax.tree.flatten(stacked)
    found = []
    for (part, _), x_G in zip(parts(stacked, granularity, 1)[1], leaves, strict=True):
        w_Gn = weights[part].T  # n is the number of layers of a scanned stack, otherwise 1
        axes = (1,) * (x_G.ndim - 2)
        found.append(x_G * (w_Gn[:, 0] if x_G.ndim == 1 else w_Gn.reshape(*w_Gn.shape, *axes)))
    return treedef.unflatten(found)

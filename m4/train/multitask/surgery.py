"""A training step with altered gradients of groups of directions, and with rates by direction.

`PCGrad` and `GradientVaccine` alter gradients to reduce conflicts. The altered gradient of a group
is a weighted sum of all groups' gradients, so a method needs only the Gram matrix and returns one
weight per group. In a stacked gradient, the first axis G of each array counts the groups.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from m4.model.layers import names_of
from m4.settings import Between, OneOf, checked
from m4.train import average
from m4.train.average import Grouped
from m4.train.multitask.groups import Directions, Grouping, by_level, check_groups
from m4.train.optimizer import is_stacked

Array = jax.Array
Floats = npt.NDArray[np.float32]
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


@dataclasses.dataclass(frozen=True)
class DirectionGroups:
    """The groups of directions whose gradients a step computes.

    They are the coarsest groups in which all directions have the same group of the surgery and the
    same rate. A step goes forward once, and back once for each group.
    """

    # Method that alters the gradients, or None if groups are only compared or have rates.
    surgery: Surgery | None
    names: Sequence[str]
    members_GD: Floats  # 1 where a direction is in a group
    coarse_HG: Floats  # 1 where a group is in one of the surgery's groups
    rates_G: Floats | None  # learning rates, or None if all are 1

    @classmethod
    def compared(cls, groups: Sequence[Sequence[str]], directions: Directions) -> "DirectionGroups":
        """Returns groups whose gradients are compared, not altered."""
        members_GD = np.array([[d in one for d in directions.names] for one in groups], np.float32)
        return cls(None, [], members_GD, np.eye(len(groups), dtype=np.float32), None)

    def sums(self, x_BT: Array, ids_BT: Array) -> Array:
        """Returns [G]: the sum of x_BT over the tokens of each group's directions."""
        flat, ids, count = x_BT.ravel(), ids_BT.ravel(), self.members_GD.shape[1]
        sum_D = jax.ops.segment_sum(flat, ids, num_segments=count)
        return jnp.sum(self.members_GD * sum_D[None], axis=1)

    def shares(self, weights_BT: Array, ids_BT: Array) -> Array:
        """Returns [G]: the groups' shares of a batch's tokens, which count by their weights."""
        tokens_G = self.sums(weights_BT, ids_BT)
        return tokens_G / jnp.maximum(jnp.sum(tokens_G), 1.0)

    def with_state(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Adds the groups' state to an optimizer's, whose `update` is replaced by the one below."""

        def init(params: Any) -> Grouped:
            surgery = rates = None
            if self.surgery is not None:
                own = self.surgery.initial_state(len(self.names))
                count = parts(params, self.surgery.granularity)[0]
                surgery = None if own is None else jnp.tile(own[None], (count, *[1] * own.ndim))
            if self.rates_G is not None:
                rates = jax.tree.map(lambda p: jnp.ones(p.shape[:-1]), params)
            return Grouped(optimizer.init(params), surgery, rates)

        return optax.GradientTransformation(init, optimizer.update)

    def update(
        self, optimizer: optax.GradientTransformation, stacked: Any, state: Grouped, params: Any,
        key: Array,
    ) -> tuple[Any, Any, Grouped, dict[str, Array]]:  # fmt: skip
        """Returns updates made from stacked gradients, and the gradient, state and metrics."""
        surgery, metrics, rates = state.surgery, {}, state.rates
        if self.surgery is not None:
            weights_nG, surgery, metrics = self._weights(stacked, state.surgery, key)
            stacked = weighted(stacked, weights_nG, self.surgery.granularity)
        gradients = jax.tree.map(lambda x_G: jnp.sum(x_G, axis=0), stacked)
        if rates is not None:
            rates = jax.tree.map(self._rates, stacked, rates)

        def scale(updates: Any) -> Any:
            if rates is None:
                return updates
            return jax.tree.map(lambda update, rate: update * rate[..., None], updates, rates)

        updates, inner = average.updated(optimizer, gradients, state.inner, params, scale)
        return updates, gradients, Grouped(inner, surgery, rates), metrics

    def _weights(self, stacked: Any, surgery: Any, key: Array):
        assert self.surgery is not None
        gram_nGG = gram(stacked, self.surgery.granularity)
        gram_nHH = jnp.einsum(
            "hg,ngk,ik->nhi", self.coarse_HG, gram_nGG, self.coarse_HG, precision="highest"
        )
        alter: Callable[..., Any] = jax.vmap(self.surgery.weights, in_axes=(0, 0, None))
        weights_nH, after = alter(gram_nHH, surgery, key)
        weights_nG = jnp.einsum("hg,nh->ng", self.coarse_HG, weights_nH, precision="highest")
        present_nH = jnp.diagonal(gram_nHH, axis1=1, axis2=2) > 0
        pairs = jnp.triu(present_nH[:, :, None] & present_nH[:, None, :], 1)
        conflicts = jnp.sum(pairs & (gram_nHH < 0)) / jnp.maximum(jnp.sum(pairs), 1)
        return weights_nG, after, {"conflicts": conflicts}

    def _rates(self, x_G: Array, old: Array) -> Array:
        """Returns each row's factor: rates weighted by gradients' norms or, if all are 0, `old`."""
        norm_G = jnp.sqrt(jnp.sum(jnp.square(x_G), axis=-1))
        rate_G = jnp.reshape(jnp.asarray(self.rates_G), (-1, *[1] * (norm_G.ndim - 1)))
        total = jnp.sum(norm_G, axis=0)
        mean = jnp.sum(rate_G * norm_G, axis=0) / jnp.where(total > 0, total, 1.0)
        return jnp.where(total > 0, mean, old)

    def note(self) -> dict[str, Any]:
        """Describes the groups in JSON, for the checkpoints that hold their state."""
        about = None if self.surgery is None else [type(self.surgery).__name__, *self.names]
        part = None if self.surgery is None else self.surgery.granularity
        return {"gradients": [about, part, self.rates_G is not None]}


def direction_groups(
    surgery: Surgery | None, rates: Floats | None, directions: Directions
) -> DirectionGroups | None:
    """Returns the groups that a training needs, if any; `rates` has one for each direction."""
    names = list(directions.names)
    rate_D = [1.0] * len(names) if rates is None else rates.tolist()
    uniform = set(rate_D) == {1.0}
    if surgery is None and uniform:
        return None
    groups = {"all": names}
    if surgery is not None:
        groups = check_groups(surgery.groups, directions, f"{type(surgery).__name__}.groups")
    group_of = {d: h for h, members in enumerate(groups.values()) for d in members}
    cell_D = [(group_of[d], rate) for d, rate in zip(names, rate_D, strict=True)]
    cells = sorted(set(cell_D))
    members_GD = np.array([[one == cell for one in cell_D] for cell in cells], np.float32)
    coarse_HG = np.array([[h == cell[0] for cell in cells] for h in range(len(groups))], np.float32)
    return DirectionGroups(
        surgery, [] if surgery is None else list(groups), members_GD, coarse_HG,
        None if uniform else np.array([rate for _, rate in cells], np.float32),
    )  # fmt: skip


def gradients_of(
    loss_fn: Callable[..., tuple[Array, Any]], groups: DirectionGroups | None
) -> Callable[..., tuple[Any, Any]]:
    """Returns the function (params, ...) -> (gradients, metrics) of a loss.

    With groups, the loss is an array [G] and gradients are stacked. One pass goes forward and one
    backward per group, one after the other, in the memory of one pass and of the gradients.
    """
    if groups is None:
        return jax.grad(loss_fn, has_aux=True)

    def stacked(params: Any, *rest: Any) -> tuple[Any, Any]:
        _, pull, metrics = jax.vjp(lambda p: loss_fn(p, *rest), params, has_aux=True)
        return jax.lax.map(lambda one: pull(one)[0], jnp.eye(len(groups.members_GD))), metrics

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

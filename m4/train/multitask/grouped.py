"""A training step with altered gradients of groups of directions, and with rates by direction.

A stacked gradient has a first axis G that counts the groups, in every array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from m4.train import average
from m4.train.average import Grouped
from m4.train.multitask.groups import Directions, check_groups
from m4.train.optimizer import is_stacked

Array = jax.Array
Floats = npt.NDArray[np.float32]
# Parts of a model whose gradients are compared: all of it, each layer, each parameter.
GRANULARITIES = ("model", "layer", "matrix")


class Surgery(Protocol):
    """A method that alters groups' gradients to reduce conflicts (`PCGrad`, `GradientVaccine`)."""

    groups: Any  # Grouping
    granularity: Any  # str

    def initial_state(self, groups: int) -> Array: ...
    def weights(self, gram_GG: Array, state: Array, key: Array) -> tuple[Array, Array]: ...


@dataclasses.dataclass(frozen=True)
class DirectionGroups:
    """The groups of directions whose gradients a step computes.

    They are the coarsest groups in which all directions have the same group of the surgery and the
    same rate. A step goes forward once, and back once for each group.
    """

    # Alters the gradients. None where groups are only compared or have rates.
    surgery: Surgery | None
    names: Sequence[str]
    members_GD: Floats  # 1 where a direction is in a group
    coarse_HG: Floats  # 1 where a group is in one of the surgery's groups
    rates_G: Floats | None  # Learning rates. None where all are 1.

    @classmethod
    def compared(cls, groups: Sequence[Sequence[str]], directions: Directions) -> DirectionGroups:
        """Returns groups whose gradients are compared, not altered."""
        members_GD = np.array([[d in one for d in directions.names] for one in groups], np.float32)
        return cls(None, [], members_GD, np.eye(len(groups), dtype=np.float32), None)

    def sums(self, x_BT: Array, ids_BT: Array) -> Array:
        """Returns the sum of x_BT in each group's directions, [G]."""
        flat, ids, count = x_BT.ravel(), ids_BT.ravel(), self.members_GD.shape[1]
        sum_D = jax.ops.segment_sum(flat, ids, num_segments=count)
        return jnp.sum(self.members_GD * sum_D[None], axis=1)

    def shares(self, weights_BT: Array, ids_BT: Array) -> Array:
        """Returns the groups' shares of a batch's tokens, [G]; a token counts by its weight."""
        tokens_G = self.sums(weights_BT, ids_BT)
        return tokens_G / jnp.maximum(jnp.sum(tokens_G), 1.0)

    def with_state(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Adds the groups' state to an optimizer's; `update` below takes the place of its own."""

        def init(params: Any) -> Grouped:
            surgery = rates = None
            if self.surgery is not None:
                own = self.surgery.initial_state(len(self.names))
                count = parts(params, self.surgery.granularity)[0]
                surgery = jnp.tile(own[None], (count, *[1] * own.ndim)) if own.size else None
            if self.rates_G is not None:
                rates = jax.tree.map(lambda p: jnp.ones(p.shape[:-1]), params)
            return Grouped(optimizer.init(params), surgery, rates)

        return optax.GradientTransformation(init, optimizer.update)

    def update(
        self,
        optimizer: optax.GradientTransformation,
        stacked: Any,
        state: Grouped,
        params: Any,
        key: Array,
    ) -> tuple[Any, Any, Grouped, dict[str, Array]]:
        """Makes the updates of a step from gradients with a first axis that counts the groups.

        Returns:
            Updates, the gradient that they are made of, the new state, and metrics.
        """
        granularity, rates = "model", state.rates
        weights_nG, surgery, metrics = None, state.surgery, {}
        if self.surgery is not None:
            granularity = self.surgery.granularity
            weights_nG, surgery, metrics = self._weights(stacked, state.surgery, key)
            gradients = weighted(stacked, weights_nG, granularity)
        else:
            gradients = jax.tree.map(lambda x_G: jnp.sum(x_G, axis=0), stacked)
        if self.rates_G is not None:
            rates = self._rates(stacked, weights_nG, granularity, state.rates)

        def scale(updates: Any) -> Any:
            if self.rates_G is None:
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
        before = jnp.zeros((len(gram_nHH), 0)) if surgery is None else surgery
        alter: Callable[..., Any] = jax.vmap(self.surgery.weights, in_axes=(0, 0, None))
        weights_nH, after = alter(gram_nHH, before, key)
        weights_nG = jnp.einsum("hg,nh->ng", self.coarse_HG, weights_nH, precision="highest")
        present_nH = jnp.diagonal(gram_nHH, axis1=1, axis2=2) > 0
        pairs = jnp.triu(present_nH[:, :, None] & present_nH[:, None, :], 1)
        conflicts = jnp.sum(pairs & (gram_nHH < 0)) / jnp.maximum(jnp.sum(pairs), 1)
        return weights_nG, None if surgery is None else after, {"conflicts": conflicts}

    def _rates(self, stacked: Any, weights_nG: Any, granularity: str, rates: Any) -> Any:
        """Returns each row's factor: rates weighed by the norms of gradients, or the last one."""
        assert self.rates_G is not None
        leaves, treedef = jax.tree.flatten(stacked)
        if weights_nG is None:
            weights_nG = jnp.ones((1, len(self.members_GD)))
        found = []
        given = by_parameter(stacked, weights_nG, granularity)
        for x_G, w_nG, old in zip(leaves, given, jax.tree.leaves(rates), strict=True):
            norm_G = jnp.sqrt(jnp.sum(jnp.square(spread(w_nG, x_G) * x_G), axis=-1))
            rate_G = jnp.reshape(self.rates_G, (-1, *[1] * (norm_G.ndim - 1)))
            total = jnp.sum(norm_G, axis=0)
            mean = jnp.sum(rate_G * norm_G, axis=0) / jnp.where(total > 0, total, 1.0)
            found.append(jnp.where(total > 0, mean, old))
        return jax.tree.unflatten(treedef, found)

    def note(self) -> dict[str, Any]:
        """Describes the groups in JSON, for the checkpoints that hold their state."""
        about = None if self.surgery is None else [type(self.surgery).__name__, *self.names]
        part = None if self.surgery is None else self.surgery.granularity
        return {"gradients": [about, part, self.rates_G is not None]}


def direction_groups(
    surgery: Surgery | None, rates: Floats | None, directions: Directions
) -> DirectionGroups | None:
    """Returns the groups that a training needs, if any; `rates` are of the directions."""
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
        surgery,
        [] if surgery is None else list(groups),
        members_GD,
        coarse_HG,
        None if uniform else np.array([rate for _, rate in cells], np.float32),
    )


def gradients_of(
    loss_fn: Callable[..., tuple[Array, Any]], groups: DirectionGroups | None
) -> Callable[..., tuple[Any, Any]]:
    """Returns the function (params, ...) -> (gradients, metrics) of a loss.

    With groups the loss is an array [G], and gradients are stacked: one pass forward, and one
    backward for each group, one after the other, in the memory of one pass and of the gradients.
    """
    if groups is None:
        return jax.grad(loss_fn, has_aux=True)

    def stacked(params: Any, *rest: Any) -> tuple[Any, Any]:
        _, pull, metrics = jax.vjp(lambda p: loss_fn(p, *rest), params, has_aux=True)
        return jax.lax.map(lambda one: pull(one)[0], jnp.eye(len(groups.members_GD))), metrics

    return stacked


def parts(params: Any, granularity: str) -> tuple[int, list[tuple[slice, bool]]]:
    """Divides a model's parameters into parts.

    Returns:
        The number of parts; and of each parameter the slice of its parts, with True where that has
        a part for each layer of a scanned stack.
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

"""A training step in which directions are tasks: gradients by group, altered and summed, and rates
by direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from m4.settings import SettingError
from m4.train import average
from m4.train.average import Grouped
from m4.train.multitask import gram
from m4.train.multitask.groups import Directions, Grouping

Array = jax.Array
Floats = npt.NDArray[np.float32]


class Surgery(Protocol):
    """What alters the groups' gradients for each other's sake (`PCGrad`, `GradientVaccine`)."""

    groups: Any  # Grouping
    granularity: Any  # str

    def begin(self, groups: int) -> Array: ...
    def weights(self, gram_GG: Array, state: Array, key: Array) -> tuple[Array, Array]: ...


@dataclasses.dataclass(frozen=True)
class DirectionGroups:
    """What a step does with the gradients of groups of directions.

    The groups whose gradients are computed are the finest ones that are needed: directions of one
    group of `surgery` and of one rate. A step goes forward once and back once a group.

    Attributes:
        names: of the surgery's groups; [] without surgery. members_GD: 1 where a direction is in a
            group of those whose gradients are computed. coarse_HG: 1 where such a group is in one
            of the surgery's. rates_G: of learning; None: all 1.
    """

    surgery: Surgery | None
    names: Sequence[str]
    members_GD: Floats
    coarse_HG: Floats
    rates_G: Floats | None

    @classmethod
    def of(cls, groups: Sequence[Sequence[str]], directions: Directions) -> DirectionGroups:
        """Groups whose gradients are compared, not altered."""
        members_GD = np.array([[d in one for d in directions.names] for one in groups], np.float32)
        return cls(None, [], members_GD, np.eye(len(groups), dtype=np.float32), None)

    def sums(self, x_BT: Array, ids_BT: Array) -> Array:
        """[G]: what x_BT has in each group's directions."""
        flat, ids, count = x_BT.ravel(), ids_BT.ravel(), self.members_GD.shape[1]
        sum_D = jax.ops.segment_sum(flat, ids, num_segments=count)
        return jnp.sum(self.members_GD * sum_D[None], axis=1)

    def shares(self, weights_BT: Array, ids_BT: Array) -> Array:
        """[G]: of the tokens of a batch. weights_BT: 1 where a token counts."""
        tokens_G = self.sums(weights_BT, ids_BT)
        return tokens_G / jnp.maximum(jnp.sum(tokens_G), 1.0)

    def begin(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """`optimizer` with the groups' state; `update` below takes the place of its update."""

        def init(params: Any) -> Grouped:
            surgery = rates = None
            if self.surgery is not None:
                own = self.surgery.begin(len(self.names))
                count = gram.parts(params, self.surgery.granularity)[0]
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
        """(updates, the gradient that made them, state, metrics). stacked: gradients, with a first
        axis that counts the groups; key: of the surgery's order."""
        granularity = "model" if self.surgery is None else self.surgery.granularity
        gradients, weights_nG, surgery, metrics = None, None, state.surgery, {}
        if self.surgery is not None:
            weights_nG, surgery, metrics = self._weights(stacked, state.surgery, key)
            gradients = gram.weighted(stacked, weights_nG, granularity)
        else:
            gradients = jax.tree.map(lambda x_G: jnp.sum(x_G, axis=0), stacked)
        rates = state.rates
        if self.rates_G is not None:
            rates = self._rates(stacked, weights_nG, granularity, state.rates)

        def scale(updates: Any) -> Any:
            return updates if self.rates_G is None else jax.tree.map(_by_row, updates, rates)

        updates, inner = average.updated(optimizer, gradients, state.inner, params, scale)
        return updates, gradients, Grouped(inner, surgery, rates), metrics

    def _weights(self, stacked: Any, surgery: Any, key: Array):
        assert self.surgery is not None
        gram_nGG = gram.gram(stacked, self.surgery.granularity)
        gram_nHH = jnp.einsum(
            "hg,ngk,ik->nhi", self.coarse_HG, gram_nGG, self.coarse_HG, precision="highest"
        )
        begun = jnp.zeros((len(gram_nHH), 0)) if surgery is None else surgery
        alter: Callable[..., Any] = jax.vmap(self.surgery.weights, in_axes=(0, 0, None))
        weights_nH, begun = alter(gram_nHH, begun, key)
        weights_nG = jnp.einsum("hg,nh->ng", self.coarse_HG, weights_nH, precision="highest")
        present_nH = jnp.diagonal(gram_nHH, axis1=1, axis2=2) > 0
        pairs = jnp.triu(present_nH[:, :, None] & present_nH[:, None, :], 1)
        conflicts = jnp.sum(pairs & (gram_nHH < 0)) / jnp.maximum(jnp.sum(pairs), 1)
        return weights_nG, None if surgery is None else begun, {"conflicts": conflicts}

    def _rates(self, stacked: Any, weights_nG: Any, granularity: str, rates: Any) -> Any:
        """The factor of each row's update: the mean of the groups' rates, weighted by the norms of
        what their gradients give to the row; as before where they give nothing."""
        assert self.rates_G is not None
        leaves, treedef = jax.tree.flatten(stacked)
        if weights_nG is None:
            weights_nG = jnp.ones((1, len(self.members_GD)))
        found = []
        given = gram.by_parameter(stacked, weights_nG, granularity)
        for x_G, w_nG, old in zip(leaves, given, jax.tree.leaves(rates), strict=True):
            norm_G = jnp.sqrt(jnp.sum(jnp.square(gram.spread(w_nG, x_G) * x_G), axis=-1))
            rate_G = jnp.reshape(self.rates_G, (-1, *[1] * (norm_G.ndim - 1)))
            total = jnp.sum(norm_G, axis=0)
            mean = jnp.sum(rate_G * norm_G, axis=0) / jnp.where(total > 0, total, 1.0)
            found.append(jnp.where(total > 0, mean, old))
        return jax.tree.unflatten(treedef, found)

    def note(self) -> dict[str, Any]:
        """JSON for checkpoints: what the groups' state belongs to."""
        about = None if self.surgery is None else [type(self.surgery).__name__, *self.names]
        part = None if self.surgery is None else self.surgery.granularity
        return {"gradients": [about, part, self.rates_G is not None]}


def _by_row(update: Array, rate: Array) -> Array:
    return update * rate[..., None]


def direction_groups(
    surgery: Surgery | None, rates: Floats | None, directions: Directions
) -> DirectionGroups | None:
    """The groups of a training; None: it needs none.

    Args:
        rates: of learning, by direction; None: all 1.

    Raises:
        SettingError: there is one group only; a direction is in two or in none.
    """
    names = list(directions.names)
    whole = {"all": names}
    groups = (
        whole
        if surgery is None
        else check_groups(surgery.groups, directions, f"{type(surgery).__name__}.groups")
    )
    group_of = {d: h for h, members in enumerate(groups.values()) for d in members}
    rate_of = dict(zip(names, [1.0] * len(names) if rates is None else rates.tolist(), strict=True))
    if surgery is None and set(rate_of.values()) == {1.0}:
        return None
    cells = sorted({(group_of[d], rate_of[d]) for d in names})
    members_GD = np.array(
        [[(group_of[d], rate_of[d]) == cell for d in names] for cell in cells], np.float32
    )
    coarse_HG = np.array([[h == cell[0] for cell in cells] for h in range(len(groups))], np.float32)
    rates_G = np.array([rate for _, rate in cells], np.float32)
    uniform = set(rate_of.values()) == {1.0}
    return DirectionGroups(
        surgery,
        list(groups) if surgery is not None else [],
        members_GD,
        coarse_HG,
        None if uniform else rates_G,
    )


def check_groups(grouping: Grouping, directions: Directions, setting: str) -> dict[str, list[str]]:
    """The groups, checked.

    Raises:
        SettingError: there is one group only; a direction is in two or in none.
    """
    groups = {name: list(members) for name, members in grouping(directions).items() if members}
    listed = [d for members in groups.values() for d in members]
    if sorted(listed) != sorted(directions.names):
        wrong = [d for d in directions.names if listed.count(d) != 1]
        raise SettingError(setting, grouping, f"such that {wrong[0]} is in one group")
    if len(groups) < 2:
        only = next(iter(groups))
        allowed = f"such that there are two groups or more; all directions are {only!r}"
        raise SettingError(setting, grouping, allowed)
    return groups


def gradients_of(
    loss_fn: Callable[..., tuple[Array, Any]], groups: DirectionGroups | None
) -> Callable[..., tuple[Any, Any]]:
    """(params, ...) -> (gradients, metrics) of a loss; of one that is an array [G], stacked.

    One pass forward, and one backward a group, one after the other: in the memory of one pass and
    of the gradients.
    """
    if groups is None:
        return jax.grad(loss_fn, has_aux=True)

    def stacked(params: Any, *rest: Any) -> tuple[Any, Any]:
        _, pull, metrics = jax.vjp(lambda p: loss_fn(p, *rest), params, has_aux=True)
        return jax.lax.map(lambda one: pull(one)[0], jnp.eye(len(groups.members_GD))), metrics

    return stacked

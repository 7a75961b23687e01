"""A training step with altered gradients of groups of directions, and rates by direction."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from m4.train import average
from m4.train.average import Grouped
from m4.train.multitask.groups import Directions, check_groups
from m4.train.multitask.surgery import Surgery, gram, parts, weighted

Array = jax.Array
Floats = npt.NDArray[np.float32]


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

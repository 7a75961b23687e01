"""Converts the state of T5X's Adafactor to the state of m4's."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from m4.model.stack import unstack
from m4.settings import SettingError
from m4.train.initial import flat, restacked
from m4.train.optimizer import FactoredState, Moments

Array = jax.Array
# Moments of each parameter: "rows" and "columns" of its matrices, or "" for full moments.
Given = Mapping[str, Mapping[str, Any]]


def check_adafactor(optimizer: optax.GradientTransformation) -> None:
    """Raises SettingError unless an optimizer's state has Adafactor's moments."""
    one = {"kernel": jax.ShapeDtypeStruct((1,), jnp.float32)}
    state = jax.eval_shape(optimizer.init, one)
    if not any(isinstance(leaf, FactoredState) for leaf in jax.tree.leaves(state, is_leaf=_known)):
        allowed = "False: a checkpoint of T5X has Adafactor's state, and the optimizer is another"
        raise SettingError("InitialModel.optimizer", True, allowed)


def with_moments(state: Any, step: int, given: Given) -> Any:
    """Puts moments into an optimizer's state after `step` steps; to be traced.

    A matrix that only one of the two optimizers factors gets the product of the factors, or the
    means of the full moments.

    Args:
        given: Moments of each parameter by its path among unscanned layers
            (`m4.train.t5x_layout.moments`).
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, FactoredState):
            return FactoredState(jnp.full_like(leaf.count, step), _tree(leaf.moments, given))
        if isinstance(leaf, optax.ScaleByScheduleState):
            return leaf._replace(count=jnp.full_like(leaf.count, step))
        return leaf

    return jax.tree.map(one, state, is_leaf=_known)


def _known(leaf: Any) -> bool:
    return isinstance(leaf, FactoredState | optax.ScaleByScheduleState)


def _tree(like: Any, given: Given) -> Any:
    made = {}
    for path in flat(jax.eval_shape(unstack, like)):
        name, _, part = path.rpartition("/")
        if part in Moments._fields:
            made[path] = _factor(given[name], part)
        elif "" in (of := given[path]):
            made[path] = of[""]
        else:
            made[path] = _full(of["rows"], of["columns"])
    return restacked(made, like)


def _factor(given: Mapping[str, Array], part: str) -> Array:
    if part in given:
        return given[part]
    return jnp.mean(given[""], axis=-1 if part == "rows" else -2)


def _full(rows: Array, columns: Array) -> Array:
    """Multiplies rows [..., R] and columns [..., C] to moments [..., R, C] as `scale_by_matrix`."""
    factors = rows / jnp.mean(rows, -1, keepdims=True)
    return factors[..., :, None] * columns[..., None, :]

"""Averages of parameters over steps, for training whose learning rate does not fall to 0."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from m4.settings import Factor, SettingError, Steps, checked

if TYPE_CHECKING:
    from m4.train.step import TrainState

Array = jax.Array


class Averaged(NamedTuple):
    """State of an averaging optimizer."""

    inner: Any  # state of the optimizer that makes the steps
    count: Array  # steps done, int32 scalar
    average: Any  # the averages, in each parameter's shape


@checked
def averaged(
    total_steps: Steps,
    *,
    optimizer: Callable[[int], optax.GradientTransformation] | None = None,
    eta: Factor = 8.0,
) -> optax.GradientTransformation:
    """Averages the parameters over an optimizer's steps, with most weight on late ones.

    Source: polynomial-decay averaging, Shamir and Zhang 2013 (arXiv 1212.1824), section 4:
    average_t = (1 - c) average_{t-1} + c params_t, c = (eta + 1) / (t + eta), t = 1, 2, ...

    Evaluations, early stopping and all readers of checkpoints use the average (`used`). Like a
    falling rate at the end of training, it damps the oscillation around a minimum, but at every
    step, so that training need not know its end. It takes the memory of the parameters, and must
    be the outermost transformation.

    Args:
        total_steps: Number of training steps, for `optimizer`.
        optimizer: Function total_steps -> optimizer that makes the steps. It must be given.
        eta: The average goes back over about 1 / (eta + 1) of the steps so far; 0 weights all
            alike.

    Raises:
        SettingError: No optimizer is given.
    """
    if optimizer is None:
        raise SettingError("averaged.optimizer", None, "a reference such as @optimizer.adamw")
    inner = optimizer(total_steps)

    def init(params):
        return Averaged(
            inner.init(params), jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params)
        )

    def update(updates, state, params=None, *, scale=lambda updates: updates):
        assert params is not None
        updates, inner_state = inner.update(updates, state.inner, params)
        updates = scale(updates)
        count = state.count + 1
        share = (eta + 1) / (count + eta)
        average = jax.tree.map(
            lambda mean, new: mean + share * (new - mean),
            state.average,
            optax.apply_updates(params, updates),
        )
        return updates, Averaged(inner_state, count, average)

    return optax.GradientTransformationExtraArgs(init, update)


def updated(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any,
    scale: Callable[[Any], Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Returns an optimizer's updates after `scale`, and its state; averages use scaled ones."""
    if isinstance(state, Averaged):
        return cast(Any, optimizer).update(gradients, state, params, scale=scale)
    updates, state = optimizer.update(gradients, state, params)
    return scale(updates), state


class Grouped(NamedTuple):
    """An optimizer's state, and the state for sets of directions (`direction_groups`)."""

    inner: Any
    surgery: Any  # State of the method that alters gradients, [parts, ...], or None.
    # Factor of each row's last update, by parameter, without its last axis; None if all are 1.
    rates: Any


def used(state: "TrainState") -> Any:
    """Returns the parameters to evaluate and translate with: their average if there is one."""
    optimizer = _inner(state.optimizer)
    return optimizer.average if isinstance(optimizer, Averaged) else state.params


def items(state: "TrainState") -> dict[str, Any]:
    """Returns a checkpoint's trees: params, optimizer and, if any, average and groups."""
    optimizer, found = _inner(state.optimizer), {"params": state.params}
    if isinstance(optimizer, Averaged):
        inner, count, average = optimizer
        # A list, because it is not an `Averaged` without the last field.
        found |= {"optimizer": [inner, count], "average": average}
    else:
        found["optimizer"] = optimizer
    if isinstance(state.optimizer, Grouped):
        _, surgery, rates = state.optimizer
        own = {"surgery": surgery, "rates": rates}
        if own := {name: tree for name, tree in own.items() if tree is not None}:
            found["groups"] = own
    return found


def from_items(like: "TrainState", step: Array, found: Mapping[str, Any]) -> "TrainState":
    """Returns the state with the `items` in `found`, in the structure of `like`."""
    names, groups = ("params", "optimizer", "average"), found.get("groups", {})
    # In the order of the state's leaves.
    parts = step, *map(found.get, names), groups.get("surgery"), groups.get("rates")
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(parts))


def _inner(optimizer: Any) -> Any:
    return optimizer.inner if isinstance(optimizer, Grouped) else optimizer

"""Learning rates by group of parameters; a rate of 0 freezes a group."""

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from m4.settings import Factor, OneOf, SettingError
from m4.train.average import updated

GROUPS = ("embeddings", "encoder", "decoder", "experts", "router")
ParameterRates = Mapping[Annotated[str, OneOf(GROUPS)], Factor]


def rate_of(path: Any, rates: ParameterRates) -> float:
    """Returns the factor of the learning rate of the parameter at a tree path.

    "embeddings" has the logits' matrix too. "experts" (a shared one too) and "router" (all else of
    a MoE layer: noise, tasks, biases) are those of both stacks, and count before "encoder" and
    "decoder". A group that is not named has 1, or for a MoE layer the rate of its stack.
    """
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if names[0].endswith("token_embedder") or names[0] == "logits_dense":
        return rates.get("embeddings", 1.0)
    rate = rates.get("encoder" if names[0].startswith("encoder") else "decoder", 1.0)
    if "moe" not in names:
        return rate
    return rates.get("experts" if {"experts", "shared"} & {*names} else "router", rate)


def with_rates(
    optimizer: optax.GradientTransformation, rates: ParameterRates
) -> optax.GradientTransformation:
    """Multiplies an optimizer's updates, weight decay included; its state is that of `optimizer`.

    Averages of parameters (`m4.train.average`) see the multiplied updates. `init` raises
    SettingError where no parameter would be trained.
    """

    def init(params: Any) -> Any:
        if not any(rate_of(path, rates) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
            allowed = "above 0 for one group: no parameter would be trained"
            raise SettingError("Training.parameter_rates", dict(rates), allowed)
        return optimizer.init(params)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        rate = rate_of(path, rates)
        return rate * leaf if rate else jnp.zeros_like(leaf)

    def update(updates, state, params=None, *, scale=lambda updates: updates) -> tuple[Any, Any]:
        def scaled(updates: Any) -> Any:
            return jax.tree_util.tree_map_with_path(one, scale(updates))

        return updated(optimizer, updates, state, params, scaled)

    return optax.GradientTransformationExtraArgs(init, update)


def without_frozen_gradients(params: Any, rates: ParameterRates) -> Any:
    """Returns the parameters so that gradients of frozen ones are 0, and are not computed."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if rate_of(path, rates) else jax.lax.stop_gradient(leaf), params
    )


def with_frozen(before: Any, after: Any, rates: ParameterRates) -> Any:
    """Returns the parameters after a step, frozen ones as before: a gate's biases move, too."""
    return jax.tree_util.tree_map_with_path(
        lambda path, old, new: new if rate_of(path, rates) else old, before, after
    )

"""The training state and its shardings."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m4.model.layers import names_of
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.mesh import parameter_shardings


@struct.dataclass
class TrainState:
    """A training state, or in the same form the shardings of one."""

    step: Any  # steps done, int32 scalar
    params: Any  # tree of float32 arrays
    optimizer: Any  # the optimizer's state, a tree of float32 arrays and int32 counts


def initialize(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Returns a new state for a seed; a pure function, to be jitted or mapped over seeds."""
    tokens, key = jnp.ones((1, 8), jnp.int32), jax.random.key(seed)
    params = model.init(key, tokens, tokens, tokens, enable_dropout=False)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def state_shardings(
    mesh: Mesh,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    fsdp_axes: Sequence[str] = ("fsdp",),
) -> TrainState:
    """Returns the sharding of every array of the state.

    An optimizer statistic with its parameter's shape is sharded like it; a factored one follows
    the leading axes that it shares with its parameter (an expert's statistics stay with it).
    """
    variables = abstract_variables(model)
    params = parameter_shardings(mesh, variables["params_axes"], variables["params"], fsdp_axes)
    replicated = NamedSharding(mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    known = {
        tuple(names_of(path)): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(params), strict=True)
    }

    def sharding(path, leaf):
        names = tuple(names_of(path))
        for start in range(len(names)):  # the parameter's path, within the optimizer's
            for stop in range(len(names), start, -1):
                if names[start:stop] in known:
                    shape, whole = known[names[start:stop]]
                    return NamedSharding(mesh, _common_spec(leaf.shape, shape, whole.spec))
        return replicated

    abstract = jax.eval_shape(optimizer.init, variables["params"])
    return TrainState(replicated, params, jax.tree_util.tree_map_with_path(sharding, abstract))


def _common_spec(shape, parameter_shape, spec) -> PartitionSpec:
    if shape == parameter_shape:
        return spec
    common = []
    for mine, its, axis in zip(shape, parameter_shape[:-2], tuple(spec), strict=False):
        if mine != its:
            break
        common.append(axis)
    return PartitionSpec(*common)

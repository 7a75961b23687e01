"""The mesh, the shardings that follow from logical axes, and host arrays made global."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from flax.linen import partitioning, spmd
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from m4.core.axes import LOGICAL_AXIS_RULES, MESH_AXES


def make_mesh(*, data: int = -1, node: int = 1, expert: int = 1, model: int = 1) -> Mesh:
    """A mesh with these axes over all devices; -1 takes what is left.

    Args:
        data: copies of the whole model, each with rows of its own.
        node, expert: experts lie apart over node * expert devices, rows too; with `node` the
            transport `hierarchical_all_to_all` tells machines (node) from devices of one (expert).
        model: parts of each matrix.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    sizes = {"data": data, "node": node, "expert": expert, "model": model}
    devices = jax.device_count()
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.make_mesh.{name} = {size}: a size is at least 1, or -1 once")
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise ValueError(f"mesh.make_mesh: only one of {free} may be -1")
    if devices % fixed or (not free and fixed != devices):
        divisors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise ValueError(
            f"mesh.make_mesh: {' x '.join(f'{name} {size}' for name, size in sizes.items())} over "
            f"{devices} devices: the sizes must multiply to {devices}; where one is -1, the others "
            f"to one of {divisors}"
        )
    if free:
        sizes[free[0]] = devices // fixed
    # Auto: the partitioner decides what the annotations leave open (jax.make_mesh's own default,
    # Explicit, would refuse products of differently sharded operands).
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 4)


def split_axes(mesh: Mesh | AbstractMesh, logical_axis: str) -> tuple[str, ...]:
    """The mesh axes that a logical axis is split over: those with more than one part."""
    rule = dict(LOGICAL_AXIS_RULES)[logical_axis]
    names = (rule,) if isinstance(rule, str) else rule or ()
    return tuple(name for name in names if mesh.shape.get(name, 1) > 1)


def check_divides(
    mesh: Mesh | AbstractMesh, array: str, size: int, logical_axis: str, gin_name: str
) -> None:
    """Raises a ValueError when an axis of an array cannot be split evenly over its mesh axes."""
    names = split_axes(mesh, logical_axis)
    parts = math.prod(mesh.shape[name] for name in names)
    if size % parts:
        down, up = size // parts * parts, (size // parts + 1) * parts
        nearest = f"the nearest that do are {down} and {up}" if down else f"the least is {up}"
        raise ValueError(
            f"{array}: {gin_name} = {size} does not divide over the {parts} parts of the mesh axes "
            f"{' x '.join(names)}; {nearest}"
        )


@contextlib.contextmanager
def logical(mesh: Mesh):
    """Within this, logical axes in the model mean the mesh's axes (core/axes.py has the table)."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(LOGICAL_AXIS_RULES):
        yield


def parameter_shardings(mesh: Mesh, params_axes: Mapping[str, Any]) -> Any:
    """Shardings in the shape of `params` from the model's collection `params_axes`."""
    names = unfreeze(partitioning.get_axis_names(params_axes))
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, logical_spec(tuple(axes))),
        names,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def logical_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The mesh axes of an array with these logical axes."""
    spec = spmd.logical_to_mesh_axes(axes, LOGICAL_AXIS_RULES)
    assert spec is not None
    return spec


def to_global(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Host arrays [B, ...] -> arrays sharded by rows over the mesh. Every host has its own rows."""
    sharding = NamedSharding(mesh, logical_spec(("batch",)))
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in batch.items()
    }

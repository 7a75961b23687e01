"""The mesh, and the shardings that follow from logical axes."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import unfreeze
from flax.linen import partitioning, spmd
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from m4.parallel.axes import LOGICAL_AXIS_RULES, MESH_AXES
from m4.parallel.divisible import nearest_valid

# Logical axis -> mesh axis, or several, or None; a logical axis may have more than one rule.
Rules = Sequence[tuple[str, str | Sequence[str] | None]]


def make_mesh(
    *,
    stage: int = 1,
    data: int = -1,
    fsdp: int = 1,
    node: int = 1,
    expert: int = 1,
    model: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with these axes over all devices; -1 takes what is left.

    Args:
        stage: parts of each stack, its layers in order, through which a pipeline passes rows.
        data: copies of the whole model, each with rows of its own.
        fsdp: the same, but every weight lies in parts over these devices and is gathered where a
            layer uses it.
        node, expert: experts lie apart over node * expert devices, rows too; with `node` the
            dispatch `hierarchical_all_to_all` tells machines (node) from devices of one (expert).
        model: parts of each matrix.
        devices: other ones than all that there are, such as those of a topology (`m4.plan`).

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    sizes: dict[str, int] = {"stage": stage, "data": data, "fsdp": fsdp}
    sizes |= {"node": node, "expert": expert, "model": model}
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.make_mesh.{name} = {size}: a size is at least 1, or -1 once")
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise ValueError(f"mesh.make_mesh: only one of {free} may be -1")
    if count % fixed or (not free and fixed != count):
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(
            f"mesh.make_mesh: {' x '.join(f'{name} {size}' for name, size in sizes.items())} over "
            f"{count} devices: the sizes must multiply to {count}; where one is -1, the others "
            f"to one of {divisors}"
        )
    if free:
        sizes[free[0]] = count // fixed
    # Auto: the partitioner decides what the annotations leave open (jax.make_mesh's own default,
    # Explicit, would refuse products of differently sharded operands).
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=kinds, devices=devices)


def split_axes(mesh: Mesh | AbstractMesh, logical_axis: str) -> tuple[str, ...]:
    """The mesh axes that a logical axis is split over: those with more than one part.

    By its first rule; a second one is for arrays in which the first one's axes are taken.
    """
    rule = next(rule for name, rule in _rules() if name == logical_axis)
    return tuple(name for name in _names(rule) if mesh.shape.get(name, 1) > 1)


def check_divides(
    mesh: Mesh | AbstractMesh, array: str, size: int, logical_axis: str, gin_name: str
) -> None:
    """Raises a ValueError when an axis of an array cannot be split evenly over its mesh axes."""
    for rule in [rule for name, rule in _rules() if name == logical_axis]:
        names = [name for name in _names(rule) if mesh.shape.get(name, 1) > 1]
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts == 0:
            continue
        raise ValueError(f"{array}: {gin_name} = {size} {_does_not_divide(size, names, parts)}")


@contextlib.contextmanager
def axis_rules_context(mesh: Mesh, extra_rules: Rules = ()):
    """Within this, logical axes in the model mean the mesh's axes (parallel/axes.py has the table).

    extra_rules: for the axes that the table leaves whole. Without any, a context inside another
        one keeps that one's.

    Raises:
        ValueError: a rule that names no logical axis or no axis of the mesh, or that the table is
            before.
    """
    rules = with_extra_rules(extra_rules) if extra_rules else _rules()
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


def with_extra_rules(rules: Rules) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """The table with `rules` after those that split, before those that leave an axis whole."""
    whole = {name for name, _ in LOGICAL_AXIS_RULES}
    further: list[tuple[str, str | tuple[str, ...] | None]] = []
    for entry in rules:
        name, rule = entry if len(entry) == 2 else ("", None)
        axes = (rule,) if isinstance(rule, str) else tuple(rule or ())
        for kind, known, found in (
            ("logical axis", whole, {name}),
            ("axis of the mesh", MESH_AXES, set(axes)),
        ):
            if wrong := found - {*known}:
                raise ValueError(
                    f"loop.train.rules: {entry!r} is no pair of a logical axis and mesh axes: "
                    f"{', '.join(map(repr, wrong))} is no {kind} ({', '.join(sorted(known))})"
                )
        if taken := dict(LOGICAL_AXIS_RULES)[name]:
            left = ", ".join(repr(name) for name, over in LOGICAL_AXIS_RULES if not over)
            raise ValueError(
                f"loop.train.rules: {entry!r} would change nothing: {name!r} is split over "
                f"{taken!r} by the table of parallel/axes.py; rules are for what that leaves whole "
                f"({left})"
            )
        further.append((name, rule if isinstance(rule, str) else axes or None))
    split = [rule for rule in LOGICAL_AXIS_RULES if rule[1]]
    return (*split, *further, *[rule for rule in LOGICAL_AXIS_RULES if not rule[1]])


def _rules() -> Sequence[tuple[str, Any]]:
    """Those of the `axis_rules_context` that we are in; outside of one the table."""
    return nn.get_logical_axis_rules() or LOGICAL_AXIS_RULES


def parameter_shardings(
    mesh: Mesh,
    params_axes: Mapping[str, Any],
    params: Mapping[str, Any],
    fsdp_axes: Sequence[str] = ("fsdp",),
) -> Any:
    """Shardings in the shape of `params` (arrays or shapes) from the collection `params_axes`.

    fsdp_axes: mesh axes over which a parameter is sharded further (`shard_further`).

    Raises:
        ValueError: fsdp_axes names no axis of the mesh; a dimension does not divide over its mesh
            axes.
    """
    if isinstance(fsdp_axes, str) or not set(fsdp_axes) <= set(mesh.shape):
        raise ValueError(
            f"loop.train.zero = {fsdp_axes!r}: must be a tuple of axes of the mesh, such as "
            f"('fsdp',); they are {', '.join(mesh.shape)}"
        )
    names = unfreeze(partitioning.get_axis_names(params_axes))

    def sharding(path: Any, axes: PartitionSpec, leaf: Any) -> NamedSharding:
        spec = logical_spec(tuple(axes))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        _check_parameter(mesh, name, tuple(axes), leaf.shape)
        fixed = [i for i, name in enumerate(axes) if name == "layers"]
        return NamedSharding(mesh, shard_further(mesh, spec, leaf.shape, fsdp_axes, fixed))

    return jax.tree_util.tree_map_with_path(
        sharding, names, unfreeze(dict(params)), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def _check_parameter(
    mesh: Mesh, name: str, axes: tuple[str | None, ...], shape: Sequence[int]
) -> None:
    """ValueError: a dimension of a parameter does not divide over its mesh axes."""
    for logical_axis, entry, size in zip(axes, logical_spec(axes), shape, strict=True):
        over = [axis for axis in _names(entry) if mesh.shape[axis] > 1]
        parts = math.prod(mesh.shape[axis] for axis in over)
        if size % parts:
            raise ValueError(
                f"parameter {name} {list(shape)}: its axis {logical_axis} = {size} "
                f"{_does_not_divide(size, over, parts)}; loop.train.rules and mesh.make_mesh say "
                "what lies over which"
            )


def _does_not_divide(size: int, over: Sequence[str], parts: int) -> str:
    axes = " x ".join(over)
    valid = nearest_valid(size, parts)
    return f"does not divide over the {parts} parts of the mesh axes {axes}; {valid}"


def shard_further(
    mesh: Mesh,
    spec: PartitionSpec,
    shape: Sequence[int],
    over: Sequence[str],
    fixed: Sequence[int] = (),
) -> PartitionSpec:
    """`spec` with one dimension split over those axes of `over` that it does not use yet.

    The largest dimension that they divide, none of `fixed`; where there is none, `spec`: what does
    not divide is small. Weights that are kept so and used whole are ZeRO's third stage
    (Rajbhandari et al. 2020, section 5; Xu et al. 2020, "Automatic Cross-Replica Sharding of
    Weight Update"): the partitioner gathers each where a layer uses it.
    """
    axes = [_names(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    used = {name for entry in axes for name in entry}
    free = tuple(name for name in over if mesh.shape[name] > 1 and name not in used)
    parts = math.prod(mesh.shape[name] for name in free)
    if parts == 1:
        return spec
    for i in sorted(range(len(shape)), key=lambda i: -shape[i]):
        if i not in fixed and shape[i] % (parts * math.prod(mesh.shape[n] for n in axes[i])) == 0:
            axes[i] += free
            return PartitionSpec(*(entry or None for entry in axes))
    return spec


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def logical_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The mesh axes of an array with these logical axes."""
    spec = spmd.logical_to_mesh_axes(axes, _rules())
    assert spec is not None
    return spec

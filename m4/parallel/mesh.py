"""The mesh, and the shardings that follow from logical axes."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from flax.linen import partitioning, spmd
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from m4.parallel.axes import LOGICAL_AXIS_RULES, MESH_AXES
from m4.parallel.platform.accelerator import skip_libtpu
from m4.settings import Between, Given, InputError, SettingError, checked, nearest_valid

skip_libtpu()

MeshSize = Annotated[int, Between(-1, 2**20)]
# Logical axis -> mesh axis, several, or None. A logical axis may have more than one rule.
Rules = Sequence[tuple[str, str | Sequence[str] | None]]


@checked
def make_mesh(
    *,
    stage: MeshSize = 1,
    data: MeshSize | None = None,
    fsdp: MeshSize = 1,
    node: MeshSize = 1,
    expert: MeshSize = 1,
    model: MeshSize = 1,
    devices: Annotated[Any, Given("the machine: all devices")] = None,
) -> Mesh:
    """Makes a mesh with these axes over all devices; -1 takes the devices that are left.

    Devices of several TPU slices: slices are along `data` where they divide it, else along `node`,
    so that only these axes send over the data center network. The other axes stay inside a slice.

    Args:
        stage: Parts of each stack, its layers in order: the stages of a pipeline.
        data: Copies of the whole model, each with separate rows. Defaults to the devices that are
            left or, where another axis is -1, to the number of slices (1 without slices).
        fsdp: Copies as with `data`, but every weight is sharded over these devices and gathered
            where a layer uses it.
        node, expert: Experts, and rows, are sharded over node * expert devices. With `node` the
            dispatch `hierarchical_all_to_all` treats machines (node) and the devices of one
            (expert) differently.
        model: Parts of each matrix.
        devices: Sequence of devices, such as those of a topology (`m4.plan`). Defaults to all.

    Raises:
        SettingError: The sizes do not fit the devices or the slices.
    """
    devices = jax.devices() if devices is None else devices
    slices = slice_count(devices)
    others = {"stage": stage, "fsdp": fsdp, "node": node, "expert": expert, "model": model}
    if data is None:
        data = slices if -1 in others.values() else -1
    sizes = {name: {**others, "data": data}[name] for name in MESH_AXES}
    free = _check_sizes(sizes, len(devices))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free is not None:
        sizes[free] = len(devices) // fixed
    # Auto: the partitioner decides what the annotations leave open (jax.make_mesh's own default,
    # Explicit, would refuse products of differently sharded operands).
    kinds = (AxisType.Auto,) * len(sizes)
    return Mesh(_arranged(sizes, slices, devices), MESH_AXES, axis_types=kinds)


def slice_count(devices: Sequence[Any]) -> int:
    """Returns the number of TPU slices; 1 for other devices.

    A GPU has a slice_index too, of its NVLink domain: `node` describes those.
    """
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", None) for device in devices})


def _arranged(sizes: Mapping[str, int], slices: int, devices: Sequence[Any]) -> np.ndarray:
    # With it any sizes are possible, such as 2 x 32 on a torus of 4 x 4 x 4 chips.
    split = {"allow_split_physical_axes": True}
    if slices == 1:
        return mesh_utils.create_device_mesh(tuple(sizes.values()), devices, **split)
    outer = next((name for name in ("data", "node") if sizes[name] % slices == 0), None)
    if outer is None:
        raise SettingError(
            "make_mesh.data",
            sizes["data"],
            f"a multiple of {slices}, the number of slices, or left out (make_mesh.node instead, "
            "for the dispatch hierarchical_all_to_all): no other axis can lie across slices",
        )
    across = {name: slices if name == outer else 1 for name in sizes}
    inside = tuple(size // across[name] for name, size in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(inside, tuple(across.values()), devices, **split)


def _check_sizes(sizes: Mapping[str, int], count: int) -> str | None:
    """Returns the axis of size -1, if any; SettingError if the sizes do not fit the devices."""
    for name, size in sizes.items():
        if size == 0:
            raise SettingError(f"make_mesh.{name}", size, "at least 1, or -1 for what is left")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        allowed = f"at least 1: make_mesh.{free[0]} is -1 already"
        raise SettingError(f"make_mesh.{free[1]}", -1, allowed)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not free and fixed != count):
        # One size is named: the first that does not fit alone, or else the largest.
        names = [name for name in sizes if count % sizes[name]]
        name = names[0] if names else max(sizes, key=lambda name: sizes[name])
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise SettingError(
            f"make_mesh.{name}",
            sizes[name],
            f"a size that makes {' x '.join(f'{axis} {size}' for axis, size in sizes.items())} "
            f"fit {count} devices: all sizes multiply to {count} or, where one is -1, the others "
            f"to one of {divisors}",
        )
    return free[0] if free else None


def split_axes(mesh: Mesh | AbstractMesh, logical_axis: str) -> tuple[str, ...]:
    """Returns the mesh axes with more than one part that a logical axis is split over.

    Its first rule decides; a second one is for arrays in which the first one's axes are taken.
    """
    rule = next((rule for name, rule in _rules() if name == logical_axis), None)
    return tuple(name for name in axes_of(rule) if mesh.shape.get(name, 1) > 1)


def rows_over(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of a batch's rows over the mesh."""
    return math.prod(mesh.shape[axis] for axis in split_axes(mesh, "batch"))


def check_divides(
    mesh: Mesh | AbstractMesh, array: str, size: int, logical_axis: str, setting: str
) -> None:
    """Raises SettingError where an axis, whose size is a setting, cannot be split over the mesh."""
    for rule in [rule for name, rule in _rules() if name == logical_axis]:
        names = [name for name in axes_of(rule) if mesh.shape.get(name, 1) > 1]
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts == 0:
            continue
        raise SettingError(setting, size, f"{_divisible(size, names, parts)} ({array})")


@contextlib.contextmanager
def axis_rules_context(mesh: Mesh, extra_rules: Rules = ()):
    """Makes logical axes in the model mean axes of this mesh, by the table of parallel/axes.py.

    `extra_rules` split what the table leaves whole; by default those around this context do.
    """
    rules = with_extra_rules(extra_rules) if extra_rules else _rules()
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


def with_extra_rules(rules: Rules) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Returns the table with `rules` after those that split, before those that leave axes whole.

    Raises SettingError for a rule of an axis that is not known, or that the table splits.
    """
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
                raise SettingError(
                    "Training.extra_axis_rules",
                    entry,
                    f"a pair of a logical axis and mesh axes: {', '.join(map(repr, wrong))} is no "
                    f"{kind} ({', '.join(sorted(known))})",
                )
        if taken := dict(LOGICAL_AXIS_RULES)[name]:
            left = ", ".join(repr(name) for name, over in LOGICAL_AXIS_RULES if not over)
            raise SettingError(
                "Training.extra_axis_rules",
                entry,
                f"about an axis that the table of parallel/axes.py leaves whole ({left}); it has "
                f"no effect on {name!r}, which is split over {taken!r}",
            )
        further.append((name, rule if isinstance(rule, str) else axes or None))
    split = [rule for rule in LOGICAL_AXIS_RULES if rule[1]]
    return (*split, *further, *[rule for rule in LOGICAL_AXIS_RULES if not rule[1]])


def _rules() -> Sequence[tuple[str, Any]]:
    """Returns the active axis rules: those of the `axis_rules_context`, else the table."""
    return nn.get_logical_axis_rules() or LOGICAL_AXIS_RULES


def parameter_shardings(
    mesh: Mesh,
    params_axes: Mapping[str, Any],
    params: Mapping[str, Any],
    fsdp_axes: Sequence[str] = ("fsdp",),
) -> Any:
    """Returns shardings of parameters (arrays or shapes) from the collection `params_axes`.

    Args:
        fsdp_axes: Mesh axes over which a parameter is sharded further (`shard_further`).

    Raises:
        SettingError: `fsdp_axes` are not axes of the mesh.
        InputError: A dimension of a parameter does not divide over its mesh axes.
    """
    if isinstance(fsdp_axes, str) or not set(fsdp_axes) <= set(mesh.shape):
        allowed = (
            f"a tuple of axes of the mesh, such as ('fsdp',); they are {', '.join(mesh.shape)}"
        )
        raise SettingError("Training.fsdp_axes", fsdp_axes, allowed)
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
    """Raises InputError where a dimension of a parameter does not divide over its mesh axes."""
    for logical_axis, entry, size in zip(axes, logical_spec(axes), shape, strict=True):
        over = [axis for axis in axes_of(entry) if mesh.shape[axis] > 1]
        parts = math.prod(mesh.shape[axis] for axis in over)
        if size % parts:
            raise InputError(
                f"parameter {name} {list(shape)}: its axis {logical_axis} = {size} must be "
                f"{_divisible(size, over, parts)}; Training.extra_axis_rules and make_mesh decide "
                "what is split over which"
            )


def _divisible(size: int, over: Sequence[str], parts: int) -> str:
    axes = " x ".join(over)
    return f"divisible by {parts}, the mesh axes {axes}; {nearest_valid(size, parts)}"


def shard_further(
    mesh: Mesh,
    spec: PartitionSpec,
    shape: Sequence[int],
    over: Sequence[str],
    fixed: Sequence[int] = (),
) -> PartitionSpec:
    """Splits one dimension of `spec` over those axes of `over` that it does not use yet.

    It is the largest dimension that they divide, and none of `fixed`; without one `spec` stays. The
    partitioner gathers such weights where a layer uses them: ZeRO's third stage (Rajbhandari et al.
    2020, section 5; Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update").
    """
    axes = [axes_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
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


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a rule or a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def logical_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the mesh axes of an array with these logical axes."""
    spec = spmd.logical_to_mesh_axes(axes, _rules())
    assert spec is not None
    return spec

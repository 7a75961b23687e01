"""The mesh, the shardings of logical axes over it, and the rows of a batch.

The mesh decides which rows a process reads, not only its number: processes that share the work on a
row (because axes such as "model" or "stage" cross processes) read the same rows.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from flax.linen import partitioning, spmd
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from m4.parallel.axes import LOGICAL_AXIS_RULES, MESH_AXES
from m4.parallel.platform.jax_setup import skip_libtpu
from m4.settings import Between, Given, InputError, SettingError, checked, nearest_valid

skip_libtpu()

MeshSize = Annotated[int, Between(-1, 2**20)]
# Logical axis -> mesh axis, several axes, or None. A logical axis may have several rules.
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
    """Makes a mesh with these axes over all devices; -1 takes the remaining devices.

    With several TPU slices, they lie along `data` if they divide it, otherwise along `node`, so
    that only these axes send over the data center network. The other axes stay inside a slice.

    Args:
        stage: Number of pipeline stages, into which each stack's layers are divided in order.
        data: Number of copies of the whole model, each with separate rows. Defaults to the
            remaining devices or, if another axis is -1, to the number of slices.
        fsdp: Number of copies like `data`, but every weight is sharded over these devices and
            gathered when a layer uses it.
        node, expert: Number of machines, and of devices in each, over which experts and rows are
            sharded (node * expert), for the dispatch `hierarchical_all_to_all`.
        model: Number of parts of each matrix.
        devices: Sequence of devices, such as those of a topology (`m4.plan`). Defaults to all.

    Raises:
        SettingError: The sizes do not fit the devices or the slices.
    """
    devices = jax.devices() if devices is None else devices
    # A GPU also has a slice_index, of its NVLink domain, which `node` describes.
    tpus = devices if devices[0].platform == "tpu" else devices[:1]
    slices = len({getattr(device, "slice_index", None) for device in tpus})
    others = {"stage": stage, "fsdp": fsdp, "node": node, "expert": expert, "model": model}
    if data is None:
        data = slices if -1 in others.values() else -1
    sizes = {name: {**others, "data": data}[name] for name in MESH_AXES}
    fixed = _check_sizes(sizes, len(devices))
    sizes = {name: len(devices) // fixed if n == -1 else n for name, n in sizes.items()}
    # Auto lets the partitioner decide what the annotations leave open. (jax.make_mesh's default,
    # Explicit, would refuse products of differently sharded operands.)
    kinds = (AxisType.Auto,) * len(sizes)
    return Mesh(_arranged(sizes, slices, devices), MESH_AXES, axis_types=kinds)


def _arranged(sizes: Mapping[str, int], slices: int, devices: Sequence[Any]) -> np.ndarray:
    # This allows any sizes, such as 2 x 32 on a torus of 4 x 4 x 4 chips.
    split = {"allow_split_physical_axes": True}
    if slices == 1:
        return mesh_utils.create_device_mesh(tuple(sizes.values()), devices, **split)
    outer = next((name for name in ("data", "node") if sizes[name] % slices == 0), None)
    if outer is None:
        allowed = f"a multiple of {slices}, the number of slices, or left out (make_mesh.node "
        allowed += "instead, for hierarchical_all_to_all): no other axis can lie across slices"
        raise SettingError("make_mesh.data", sizes["data"], allowed)
    across = {name: slices if name == outer else 1 for name in sizes}
    inside = tuple(size // across[name] for name, size in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(inside, tuple(across.values()), devices, **split)


def _check_sizes(sizes: Mapping[str, int], count: int) -> int:
    """Returns the product of the sizes without -1. Raises SettingError if they do not fit."""
    for name, size in sizes.items():
        if size == 0:
            raise SettingError(f"make_mesh.{name}", size, "at least 1, or -1 for what is left")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        allowed = f"at least 1: make_mesh.{free[0]} is -1 already"
        raise SettingError(f"make_mesh.{free[1]}", -1, allowed)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if count % fixed or (not free and fixed != count):
        # The message names one size: the first that does not fit alone, otherwise the largest.
        names = [name for name in sizes if count % sizes[name]]
        name = names[0] if names else max(sizes, key=lambda name: sizes[name])
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        all_sizes = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        allowed = (
            f"a size that makes {all_sizes} fit {count} devices: all sizes multiply to {count} or, "
            f"where one is -1, the others to one of {divisors}"
        )
        raise SettingError(f"make_mesh.{name}", sizes[name], allowed)
    return fixed


def split_axes(mesh: Mesh | AbstractMesh, logical_axis: str) -> tuple[str, ...]:
    """Returns the mesh axes with more than one part over which a logical axis is split.

    Its first rule decides; a second one is for arrays that use the first one's axes already.
    """
    rule = next((rule for name, rule in _rules() if name == logical_axis), None)
    return tuple(name for name in axes_of(rule) if mesh.shape.get(name, 1) > 1)


def rows_over(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of a batch's rows over the mesh."""
    return math.prod(mesh.shape[axis] for axis in split_axes(mesh, "batch"))


def check_divides(
    mesh: Mesh | AbstractMesh, array: str, size: int, logical_axis: str, setting: str
) -> None:
    """Raises SettingError if an axis, whose size is a setting, cannot be split over the mesh."""
    for rule in [rule for name, rule in _rules() if name == logical_axis]:
        names = [name for name in axes_of(rule) if mesh.shape.get(name, 1) > 1]
        if size % (parts := math.prod(mesh.shape[name] for name in names)):
            raise SettingError(setting, size, f"{_divisible(size, names, parts)} ({array})")


@contextlib.contextmanager
def axis_rules_context(mesh: Mesh, extra_rules: Rules = ()):
    """Maps logical axes in the model to axes of this mesh, by the table of parallel/axes.py.

    `extra_rules` split what the table leaves whole. Defaults to those of the enclosing context.
    """
    rules = with_extra_rules(extra_rules) if extra_rules else _rules()
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


def with_extra_rules(rules: Rules) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Returns the table with `rules` placed between splitting and non-splitting rules.

    Raises SettingError for a rule about an unknown axis, or one that the table splits.
    """
    table, setting = dict(LOGICAL_AXIS_RULES), "Training.extra_axis_rules"
    split, left = ([r for r in LOGICAL_AXIS_RULES if bool(r[1]) is over] for over in (True, False))
    further: list[tuple[str, str | tuple[str, ...] | None]] = []
    for entry in rules:
        name, rule = entry if len(entry) == 2 else ("", None)
        rule = _hashable(rule)
        axes = axes_of(rule)
        if wrong := [*({name} - {*table}), *({*axes} - {*MESH_AXES})]:
            known = f"{', '.join(sorted(table))}; of the mesh {', '.join(MESH_AXES)}"
            allowed = f"a pair of a logical axis and mesh axes: {wrong[0]!r} is no axis ({known})"
            raise SettingError(setting, entry, allowed)
        if taken := table[name]:
            allowed = (
                f"about an axis that the table of parallel/axes.py leaves whole "
                f"({', '.join(repr(one) for one, _ in left)}); it has no effect on {name!r}, which "
                f"is split over {taken!r}"
            )
            raise SettingError(setting, entry, allowed)
        further.append((name, rule))
    return (*split, *further, *left)


def _hashable(rule: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    return rule if isinstance(rule, str) else tuple(rule or ()) or None


def _rules() -> Sequence[tuple[str, Any]]:
    """Returns the active axis rules: those of `axis_rules_context`, otherwise the table."""
    return nn.get_logical_axis_rules() or LOGICAL_AXIS_RULES


def parameter_shardings(
    mesh: Mesh,
    params_axes: Mapping[str, Any],
    params: Mapping[str, Any],
    fsdp_axes: Sequence[str] = ("fsdp",),
) -> Any:
    """Returns the shardings of parameters (arrays or shapes) by the collection `params_axes`.

    Args:
        fsdp_axes: Mesh axes over which a parameter is sharded further (`shard_further`).

    Raises:
        SettingError: `fsdp_axes` are not axes of the mesh.
        InputError: A dimension of a parameter does not divide over its mesh axes.
    """
    if isinstance(fsdp_axes, str) or not set(fsdp_axes) <= set(mesh.shape):
        allowed = f"a tuple of axes of the mesh, as ('fsdp',); they are {', '.join(mesh.shape)}"
        raise SettingError("Training.fsdp_axes", fsdp_axes, allowed)
    names = unfreeze(partitioning.get_axis_names(params_axes))

    def sharding(path: Any, axes: PartitionSpec, leaf: Any) -> NamedSharding:
        spec = logical_spec(tuple(axes))
        for logical_axis, entry, size in zip(axes, spec, leaf.shape, strict=True):
            over = [axis for axis in axes_of(entry) if mesh.shape[axis] > 1]
            if size % (parts := math.prod(mesh.shape[axis] for axis in over)):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise InputError(
                    f"parameter {name} {list(leaf.shape)}: its axis {logical_axis} = {size} must "
                    f"be {_divisible(size, over, parts)}; Training.extra_axis_rules and make_mesh "
                    "decide what is split over which"
                )
        fixed = [i for i, name in enumerate(axes) if name == "layers"]
        return NamedSharding(mesh, shard_further(mesh, spec, leaf.shape, fsdp_axes, fixed))

    return jax.tree_util.tree_map_with_path(
        sharding, names, unfreeze(dict(params)), is_leaf=lambda x: isinstance(x, PartitionSpec)
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
    """Splits one dimension of `spec` over the axes of `over` that it does not use yet.

    It takes the largest dimension that they divide, outside `fixed`, if any. The partitioner
    gathers
    such weights when a layer uses them: ZeRO's third stage (Rajbhandari et al. 2020, section 5; Xu
    et al. 2020, "Automatic Cross-Replica Sharding of Weight Update").
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


# ---------------------------------------------------------------- rows of a batch, and a layout

# (i, n) is the i-th of n equal shards of the rows.
Part = tuple[int, int]


def host_shards(mesh: Mesh) -> list[Part]:
    """Returns the shards of every batch that this process reads; adjacent ones are merged."""
    _, own, parts = _own(mesh)
    if parts % len(own) == 0 and own[0] % len(own) == 0 and own[-1] - own[0] == len(own) - 1:
        return [(own[0] // len(own), parts // len(own))]
    return [(i, parts) for i in own]


def host_batch(
    batch: Callable[[int, Part], Mapping[str, np.ndarray]], step: int, parts: Sequence[Part]
) -> Mapping[str, np.ndarray]:
    """Returns this process's rows of a step's batch, for `parts` from `host_shards`."""
    if len(parts) == 1:
        return batch(step, parts[0])
    each = [batch(step, part) for part in parts]
    return {name: np.concatenate([one[name] for one in each]) for name in each[0]}


def host_rows(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns this process's rows of a batch that all processes have in full."""
    _, own, parts = _own(mesh)
    return {
        name: np.concatenate([np.split(value, parts)[i] for i in own])
        for name, value in batch.items()
    }


def to_global(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes arrays [B, ...], sharded by rows, from host arrays [rows of this process, ...]."""
    sharding, own, parts = _own(mesh)

    def whole(value: np.ndarray) -> jax.Array:
        each = len(value) // len(own)
        assert each * len(own) == len(value), (value.shape, own)

        def local(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start = own.index((index[0].start or 0) // each) * each
            return value[start : start + each]

        return jax.make_array_from_callback((each * parts, *value.shape[1:]), sharding, local)

    return {name: whole(value) for name, value in batch.items()}


def _own(mesh: Mesh) -> tuple[NamedSharding, list[int], int]:
    """Returns the sharding of rows, this process's shards, and the number of shards."""
    sharding, parts = NamedSharding(mesh, logical_spec(("batch",))), rows_over(mesh)
    here = sharding.addressable_devices_indices_map((parts,)).values()
    return sharding, sorted({at[0].start or 0 for at in here if at is not None}), parts


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with the sharding of weights and rows; equal layouts share compiled programs."""

    mesh: Mesh
    # Settings of the model's training.
    fsdp_axes: Sequence[str] = ("fsdp",)
    extra_axis_rules: Rules = ()

    def __post_init__(self) -> None:
        with_extra_rules(self.extra_axis_rules)  # this checks the rules
        # gin gives lists, but parts of a program's key must be hashable.
        rules = tuple((name, _hashable(rule)) for name, rule in self.extra_axis_rules)
        object.__setattr__(self, "extra_axis_rules", rules)
        object.__setattr__(self, "fsdp_axes", tuple(self.fsdp_axes))

    def axis_rules(self) -> AbstractContextManager[None]:
        """Returns a context that maps logical axes to this mesh, in which programs are called."""
        return axis_rules_context(self.mesh, self.extra_axis_rules)

    def shardings(self, params_axes: Mapping[str, Any], params: Mapping[str, Any]) -> Any:
        """Returns the shardings of parameters (arrays or shapes) by their logical axes."""
        with self.axis_rules():
            return parameter_shardings(self.mesh, params_axes, params, self.fsdp_axes)

    def rows(self, least: int) -> int:
        """Rounds a number of rows up until it divides over the devices."""
        with self.axis_rules():
            parts = rows_over(self.mesh)
        return -(-least // parts) * parts

    def batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Shards arrays [B, ...], which all processes have in full, by rows."""
        with self.axis_rules():
            return to_global(self.mesh, host_rows(self.mesh, batch))

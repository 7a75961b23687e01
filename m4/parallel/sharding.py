"""GShard's annotations of which device has which part of an array (arXiv 2006.16668, section 3.2).

Names and meanings are those of the paper and of Lingvo's `xla_sharding` and `gshard_utils`;
docs/parallelism.md has a table with examples. Each returns its array with the same values. A few in
a function are enough: XLA's partitioner infers the rest and inserts communication. Inside `jax.jit`
they are `jax.lax.with_sharding_constraint`. Outside, they move the parts of an array at once
(`jax.device_put`), or give a `jax.ShapeDtypeStruct` that sharding, to compile a program for arrays
that need not exist.

**Devices.** Ids are positions in `devices`, by default `jax.devices()`; each must occur once. In
JAX, a compiled program has one order of devices, here that of `devices`. Ids of a grid with
permuted axes, such as [[0, 2], [1, 3]], become axes of a mesh in that order. Any other pattern,
such as [3, 1, 2, 0], is a separate order, which JAX does not mix with another in one program
("incompatible devices"): pass it as `devices` to all annotations instead.

**Sizes.** A dimension must divide into its parts; uneven parts are not padded as in the paper.

**Meshes.** Annotations are for JAX's Auto axes. Under `jax.set_mesh` with Explicit axes, use
`jax.sharding.reshard`. In the body of a `jax.shard_map`, arrays are local (the paper's
`auto_to_manual` is `jax.shard_map` with its `in_specs`, `manual_to_auto` its `out_specs`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from m4.settings import nearest_valid

A = TypeVar("A", jax.Array, jax.ShapeDtypeStruct)
Devices = Sequence[Any] | None  # jax.Device
Ids = np.ndarray | Sequence


def replicate(x: A, *, devices: Devices = None) -> A:
    """Gives every device the whole array.

    Raises:
        ValueError: Called under a mesh of Explicit or Manual axes.
    """
    held = _devices("replicate", devices)
    return _annotate("replicate", x, np.arange(len(held)), [-1] * x.ndim, held)


def split(x: A, split_dimension: int, num_partitions: int, *, devices: Devices = None) -> A:
    """Splits one dimension into equal parts over the devices, in order.

    With fewer parts than devices, neighbours hold copies: with 2 parts over 8 devices, 0-3 have the
    first half and 4-7 the second.

    Raises:
        ValueError: The dimension, the parts or the devices do not fit each other.
    """
    held = _devices("split", devices)
    if not -x.ndim <= split_dimension < x.ndim:
        said = f"dimension {split_dimension} of an array with {x.ndim} dimensions"
        raise ValueError(f"sharding.split: {said}")
    if num_partitions < 1 or len(held) % num_partitions:
        fit = ", ".join(str(n) for n in range(1, len(held) + 1) if len(held) % n == 0)
        said = f"{num_partitions} partitions of {len(held)} devices; it can be {fit}"
        raise ValueError(f"sharding.split: {said}")
    mapping = [-1] * x.ndim
    mapping[split_dimension] = 0
    ids = np.arange(len(held)).reshape(num_partitions, -1)
    return _annotate("split", x, ids, mapping, held)


def shard(x: A, device_assignment: Ids, *, devices: Devices = None) -> A:
    """Splits several dimensions, and says which device has which shard.

    An array [256, 1024, 8192] with an assignment of shape [2, 1, 4] has parts
    [128, 1024, 2048]; `device_assignment[i, 0, k]` has rows 128 i ... of columns 2048 k ... .

    Raises:
        ValueError: The dimensions or the ids do not fit.
    """
    return _tiled("shard", x, device_assignment, devices, copies=0)


tile = shard  # Lingvo's name


def partial_tile(x: A, tile_assignment: Ids, *, devices: Devices = None) -> A:
    """Splits into tiles; devices along the additional last dimension of the ids hold copies."""
    return _tiled("partial_tile", x, tile_assignment, devices, copies=1)


def mesh_split(
    x: A, device_mesh: Mesh | Ids, dims_mapping: Sequence[int], *, devices: Devices = None
) -> A:
    """Splits dimensions over those of a mesh of devices.

    The paper's 2-D sharded dense weights: attention [heads, depth, width] by [1, -1, 0],
    feed-forward [width, hidden] by [0, 1].

    Args:
        device_mesh: Ids of devices, or a JAX mesh with Auto axes (which includes devices).
        dims_mapping: For each dimension of x, the mesh dimension over which it is split, or -1 if
            it is not split. Devices along other mesh dimensions hold copies.

    Raises:
        ValueError: The mapping, the dimensions or the ids do not fit.
    """
    mapping = [int(dimension) for dimension in dims_mapping]
    over = np.ndim(device_mesh.devices if isinstance(device_mesh, Mesh) else device_mesh)
    named = [dimension for dimension in mapping if dimension != -1]
    if len(mapping) != x.ndim:
        raise ValueError(
            f"sharding.mesh_split: dims_mapping {mapping} has {len(mapping)} entries, the array "
            f"{list(x.shape)} has {x.ndim} dimensions; -1 is for one that is not split"
        )
    if len({*named}) != len(named) or not all(0 <= dimension < over for dimension in named):
        raise ValueError(
            f"sharding.mesh_split: dims_mapping {mapping}: an entry is -1 or one of the mesh's "
            f"dimensions, {', '.join(str(n) for n in range(over))}, each at most once"
        )
    if not isinstance(device_mesh, Mesh):
        return _annotate("mesh_split", x, device_mesh, mapping, _devices("mesh_split", devices))
    if devices is not None:
        raise ValueError("sharding.mesh_split: a mesh of JAX has its devices: leave devices out")
    if any(kind != AxisType.Auto for kind in device_mesh.axis_types):
        raise ValueError(f"sharding.mesh_split: {device_mesh}: all its axes must be Auto")
    _check_divides("mesh_split", x.shape, device_mesh.devices.shape, mapping)
    spec = [None if d == -1 else device_mesh.axis_names[d] for d in mapping]
    return _place("mesh_split", x, NamedSharding(device_mesh, PartitionSpec(*spec)))


def _tiled(name: str, x: A, assignment: Ids, devices: Devices, copies: int) -> A:
    ids = np.asarray(assignment)
    if ids.ndim != x.ndim + copies:
        more = " and one more, for copies" if copies else ""
        raise ValueError(
            f"sharding.{name}: an assignment of shape {list(ids.shape)} for an array "
            f"{list(x.shape)}: it needs as many dimensions{more}"
        )
    return _annotate(name, x, ids, list(range(x.ndim)), _devices(name, devices))


def _annotate(name: str, x: A, ids: Ids, mapping: Sequence[int], devices: Sequence[Any]) -> A:
    """Splits dimension i over dimension mapping[i] of the ids; -1 leaves it unsplit."""
    ids = np.asarray(ids)
    if sorted(ids.reshape(-1).tolist()) != list(range(len(devices))):
        raise ValueError(
            f"sharding.{name}: ids {ids.tolist()}: each of 0 ... {len(devices) - 1}, the positions "
            f"of the {len(devices)} devices, must be there once; for others give devices="
        )
    _check_divides(name, x.shape, ids.shape, mapping)
    grid = _grid(ids)
    names = tuple(f"d{axis}" for axis in range(len(grid.sizes)))
    held = np.array([devices[i] for i in grid.order]).reshape(grid.sizes)
    mesh = Mesh(held, names, axis_types=(AxisType.Auto,) * len(names))
    spec = [
        tuple(names[axis] for axis in grid.axes[d]) or None if d != -1 else None for d in mapping
    ]
    return _place(name, x, NamedSharding(mesh, PartitionSpec(*spec)))


def _place(name: str, x: A, sharding: NamedSharding) -> A:
    around = jax.sharding.get_abstract_mesh()
    if any(kind != AxisType.Auto for kind in around.axis_types):
        raise ValueError(
            f"sharding.{name}: under a mesh of Explicit or Manual axes ({around}): with Explicit "
            "ones use jax.sharding.reshard; in jax.shard_map an array is local"
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if isinstance(x, Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.device_put(x, sharding)


class _Grid(NamedTuple):
    order: list[int]  # positions of the devices along the mesh, outermost axis first
    sizes: list[int]  # sizes of the mesh's axes
    axes: list[list[int]]  # for each dimension of the ids, its mesh axes, outermost first


def _grid(ids: np.ndarray) -> _Grid:
    """Returns a mesh with this assignment, in the order 0, 1, 2 ... if possible.

    It is possible if along each dimension the ids grow like the digits of a number: 0, 1, 4, 5 is a
    digit of step 1 inside one of step 4. The steps of all digits become the mesh's axes, which have
    prime sizes, so that the annotations of a program share one mesh if they can.
    """
    digits, rebuilt = [], np.zeros((), ids.dtype)
    for dimension, size in enumerate(ids.shape):
        along = np.moveaxis(ids, dimension, 0).reshape(size, -1)[:, 0] - ids.flat[0]
        digits += [] if (own := _digits(along)) is None else [own]
        rebuilt = np.add.outer(rebuilt, along)
    if len(digits) < ids.ndim or not np.array_equal(rebuilt, ids):
        in_order = _grid(np.arange(ids.size).reshape(ids.shape))
        return in_order._replace(order=ids.reshape(-1).tolist())
    # All ids occur once, so the sorted steps are 1, the first size, the product of two sizes ...
    steps = sorted((digit for own in digits for digit in own), reverse=True)
    axis = {step: place for place, (step, _) in enumerate(steps)}
    axes = [[axis[step] for step, _ in reversed(own)] for own in digits]
    return _Grid(list(range(ids.size)), [size for _, size in steps], axes)


def _digits(along: np.ndarray, done: int = 1) -> list[tuple[int, int]] | None:
    """Returns (step, size) of the digits that count 0, along[1], ..., innermost first, or None."""
    if done == len(along):
        return []
    for size in _prime_factors(len(along) // done):
        step = int(along[done])
        counted = np.add.outer(np.arange(size) * step, along[:done]).reshape(-1)
        if step > 0 and np.array_equal(along[: size * done], counted):
            outer = _digits(along, size * done)
            if outer is not None:
                return [(step, size), *outer]
    return None


def _prime_factors(number: int) -> list[int]:
    """Returns the distinct prime factors: [2, 3] for 12."""
    dividing = [n for n in range(2, number + 1) if number % n == 0]
    return [n for n in dividing if not any(n % m == 0 for m in dividing if m < n)]


def _devices(name: str, devices: Devices) -> Sequence[Any]:
    devices = jax.devices() if devices is None else list(devices)
    if not devices or len({*devices}) != len(devices):
        raise ValueError(f"sharding.{name}: devices must be at least one, and each once: {devices}")
    return devices


def _check_divides(
    name: str, shape: Sequence[int], parts: Sequence[int], mapping: Sequence[int]
) -> None:
    for dimension, over in enumerate(mapping):
        size, count = shape[dimension], parts[over] if over != -1 else 1
        if size % count:
            raise ValueError(
                f"sharding.{name}: dimension {dimension} of an array {list(shape)} does not divide "
                f"into {count} parts; {nearest_valid(size, count)}"
            )

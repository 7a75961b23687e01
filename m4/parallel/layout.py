"""Rows of a batch that a process reads, host arrays -> arrays over the mesh, and a model's layout.

The mesh decides which rows, not the process's number alone: processes that share the work on a row
(where mesh axes such as "model" or "stage" cross processes) read the same rows.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from m4.parallel.mesh import Rules, axis_rules_context, logical_spec, parameter_shardings, rows_over

# (i, n) is the i-th of n equal shards of the rows.
Part = tuple[int, int]


def host_shards(mesh: Mesh) -> list[Part]:
    """Returns the shards of every batch that this process reads, in the order of the rows.

    It is one shard where they are neighbours, as nearly always.
    """
    own, parts = _own(_sharding(mesh))
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
    """Returns this process's rows of a batch that every process has in full."""
    own, parts = _own(_sharding(mesh))
    return {
        name: np.concatenate([np.split(value, parts)[i] for i in own])
        for name, value in batch.items()
    }


def to_global(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Makes arrays [B, ...], sharded by rows, from host arrays [rows of this process, ...]."""
    sharding = _sharding(mesh)
    own, parts = _own(sharding)

    def whole(value: np.ndarray) -> jax.Array:
        each = len(value) // len(own)
        assert each * len(own) == len(value), (value.shape, own)

        def local(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start = own.index((index[0].start or 0) // each) * each
            return value[start : start + each]

        return jax.make_array_from_callback((each * parts, *value.shape[1:]), sharding, local)

    return {name: whole(value) for name, value in batch.items()}


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, logical_spec(("batch",)))


def _own(sharding: NamedSharding) -> tuple[list[int], int]:
    """Returns the shards on this process's devices, in order, and the number of shards."""
    # The number of devices is a number of rows that every number of shards divides.
    rows = sharding.mesh.size
    starts = [index[0].start or 0 for index in sharding.devices_indices_map((rows,)).values()]
    parts = len(set(starts))
    here = {
        (index[0].start or 0) * parts // rows
        for index in sharding.addressable_devices_indices_map((rows,)).values()
        if index is not None
    }
    return sorted(here), parts


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how weights and rows are sharded over it; equal ones share compiled programs."""

    mesh: Mesh
    # The settings under which the model was trained.
    fsdp_axes: Sequence[str] = ("fsdp",)
    extra_axis_rules: Rules = ()

    def __post_init__(self) -> None:
        # gin gives lists, and what a program depends on must be hashable.
        rules = [
            (name, to if isinstance(to, str) else tuple(to or ()) or None)
            for name, to in self.extra_axis_rules
        ]
        object.__setattr__(self, "extra_axis_rules", tuple(rules))
        object.__setattr__(self, "fsdp_axes", tuple(self.fsdp_axes))

    def axis_rules(self) -> AbstractContextManager[None]:
        """Returns a context in which logical axes mean the mesh's; programs are called in it."""
        return axis_rules_context(self.mesh, self.extra_axis_rules)

    def shardings(self, params_axes: Mapping[str, Any], params: Mapping[str, Any]) -> Any:
        """Returns the shardings of parameters (arrays or shapes), from their logical axes."""
        with self.axis_rules():
            return parameter_shardings(self.mesh, params_axes, params, self.fsdp_axes)

    def rows(self, least: int) -> int:
        """Returns the fewest rows, at least `least`, that divide over the devices of rows."""
        with self.axis_rules():
            parts = rows_over(self.mesh)
        return -(-least // parts) * parts

    def batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Shards arrays [B, ...], which every process has in full, by rows."""
        with self.axis_rules():
            return to_global(self.mesh, host_rows(self.mesh, batch))

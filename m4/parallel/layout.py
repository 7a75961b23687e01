"""Sharding of a model's weights and batches over a mesh when it translates."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from m4.parallel.host_batches import host_rows, to_global
from m4.parallel.mesh import Rules, axis_rules_context, parameter_shardings, rows_over


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how weights and rows are sharded over it; equal ones share compiled programs.

    Attributes:
        mesh: The mesh.
        fsdp_axes, extra_axis_rules: The settings under which the model was trained.
    """

    mesh: Mesh
    fsdp_axes: Sequence[str] = ("fsdp",)
    extra_axis_rules: Rules = ()

    def __post_init__(self) -> None:
        # gin gives lists, and what a program depends on must be hashable.
        rules = [
            (name, to if isinstance(to, str) else tuple(to or ()))
            for name, to in self.extra_axis_rules
        ]
        object.__setattr__(
            self, "extra_axis_rules", tuple((name, to or None) for name, to in rules)
        )
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

"""How a model's weights and its batches lie over a mesh when it translates."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from m4.parallel.host_batches import own_rows, to_global
from m4.parallel.mesh import Rules, logical, parameter_shardings, split_axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how weights and rows lie over it; equal ones share compiled programs.

    Attributes:
        zero, rules: those of `m4.train.loop.train`, under which the model was trained.
    """

    mesh: Mesh
    zero: Sequence[str] = ("fsdp",)
    rules: Rules = ()

    def __post_init__(self) -> None:
        # gin gives lists, and what a program depends on must be hashable.
        rules = [(name, to if isinstance(to, str) else tuple(to or ())) for name, to in self.rules]
        object.__setattr__(self, "rules", tuple((name, to or None) for name, to in rules))
        object.__setattr__(self, "zero", tuple(self.zero))

    def logical(self) -> AbstractContextManager[None]:
        """Within it logical axes mean the mesh's; programs are to be traced and called there."""
        return logical(self.mesh, self.rules)

    def shardings(self, params_axes: Mapping[str, Any], params: Mapping[str, Any]) -> Any:
        """Of parameters (arrays or shapes), from their logical axes."""
        with self.logical():
            return parameter_shardings(self.mesh, params_axes, params, self.zero)

    def rows(self, least: int) -> int:
        """The fewest rows, `least` or more, that divide over the devices that rows lie over."""
        with self.logical():
            parts = math.prod(self.mesh.shape[axis] for axis in split_axes(self.mesh, "batch"))
        return -(-least // parts) * parts

    def batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Arrays [B, ...] that every process has whole -> the same, rows over the mesh.

        A process puts the rows of its own devices there.
        """
        with self.logical():
            return to_global(self.mesh, own_rows(self.mesh, batch))

"""What a gate keeps in the checkpoint: its router's matrix, or a table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning

Array = jax.Array

# What a router matrix starts as, by name; which gate wants which is in docs/gates.md.
ROUTER_INITS = {
    "normal": nn.initializers.normal(0.02),  # flaxformer
    "zeros": nn.initializers.zeros,  # Shazeer et al. 2017: balanced at first, noise decides
    "orthogonal": nn.initializers.orthogonal(0.1),  # BASE's centroids (fairseq)
}


class Table(nn.Module):
    """A table [V] of integers from make(V): `<name>/table`.

    Kept as a float32 parameter without a gradient, exact to 2^24: so it goes wherever parameters
    go. Optimizers leave parameters of this name alone (`m4.train.optimizer.keep_tables`).
    """

    size: int
    make: Callable[[int], Any]

    @nn.compact
    def __call__(self) -> Array:
        if self.has_variable("params", "table"):
            # Not asked for again: flax would run `make` to compare shapes.
            table = self.get_variable("params", "table")
        else:
            table = partitioning.param_with_axes(
                "table", lambda key: self._made(), axes=("unmodeled",), module=self
            )
        return jax.lax.stop_gradient(table).astype(jnp.int32)

    def _made(self) -> Array:
        if _SHAPES_ONLY.get():
            return jnp.zeros(self.size, jnp.float32)
        # Arrays of numpy: making it is no part of the compiled program.
        return jnp.asarray(np.asarray(self.make(self.size)), jnp.float32)


# A table is made while a program is traced, which does not know what it is traced for.
_SHAPES_ONLY = ContextVar("shapes_only", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Within, `init` is traced for its shapes: no `Table` is made, so that a trained model needs
    none of the files that its tables were made from."""
    before = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(before)


class RouterKernel(nn.Module):
    """The gate's matrix W_g [M, E], float32, without bias: `<name>/kernel`."""

    shape: tuple[int, int]
    init: str = "normal"

    @nn.compact
    def __call__(self) -> Array:
        return partitioning.param_with_axes(
            "kernel",
            ROUTER_INITS[self.init],
            self.shape,
            jnp.float32,
            axes=("embed", "unmodeled"),
            module=self,
        )

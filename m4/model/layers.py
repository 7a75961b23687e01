"""T5's small layers: RMS norm, bias-free projection, embedding, positions, dropout.

Every trained parameter is made by `parameter`, which, like `Table`, records its logical axes in the
collection `params_axes`. The table in `m4.parallel.axes` (or T5X's own) turns them into shardings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning
from flax.linen.spmd import with_logical_constraint

from m4.model.product import Precision, product, tied_logits

Array = jax.Array
Initializer = Callable[..., Array]
# A number type or its name, as `m4.settings` checks it.
if TYPE_CHECKING:
    DType = Any
else:
    DType = Literal["float32", "bfloat16", "float16"] | Callable[..., Any]

# "fan_in" with truncation is T5X's kernel initialisation.
kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def parameter(module: nn.Module, name: str, init: Initializer, shape: Any, axes: Any) -> Array:
    """Returns a float32 parameter of a module, and records its logical axes."""
    return partitioning.param_with_axes(name, init, shape, jnp.float32, axes=axes, module=module)


class RmsNorm(nn.Module):
    """T5's layer norm: x / rms(x) * scale, no mean, no bias. [..., M] -> [..., M].

    It is computed in float32; the result has the type `dtype`.
    """

    epsilon: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x_BLM: Array) -> Array:
        x = x_BLM.astype(jnp.float32)
        scale = parameter(self, "scale", nn.initializers.ones, (x.shape[-1],), ("embed",))
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        shape = (1,) * (x.ndim - 1) + scale.shape
        return (x * scale.reshape(shape)).astype(self.dtype)


class Kernel(nn.Module):
    """A float32 matrix, `<name>/kernel`, for layers that multiply by it themselves."""

    shape: tuple[int, ...]  # [in, out], or [E, in, out] for experts
    axes: tuple[str, ...]
    init: Initializer = kernel_init

    @nn.compact
    def __call__(self) -> Array:
        return parameter(self, "kernel", self.init, self.shape, self.axes)


class Dense(nn.Module):
    """Projection without bias: [..., in] -> [..., features]."""

    features: int
    axes: tuple[str, str]
    dtype: jnp.dtype = jnp.float32
    precision: Precision = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1], self.features)
        kernel = parameter(self, "kernel", kernel_init, shape, self.axes)
        return product(x.astype(self.dtype), kernel.astype(self.dtype), self.precision)


class Embed(nn.Module):
    """Token embedding [V, M], looked up by gather; `attend` returns logits by the same matrix.

    Entries start as N(0, 1/M) and a looked-up row is multiplied by sqrt(M) (Vaswani et al. 2017,
    section 3.4; Lingvo), so that the input and the tied logits start with unit variance. T5 stores
    N(0, 1) and divides the logits instead. That is the same function, but Adam, whose steps do not
    grow with the parameter, would learn it sqrt(M) times more slowly.
    """

    vocab_size: int
    features: int
    dtype: jnp.dtype = jnp.float32

    def setup(self) -> None:
        init, shape = nn.initializers.normal(self.features**-0.5), (self.vocab_size, self.features)
        self.embedding = parameter(self, "embedding", init, shape, ("vocab", "embed"))

    def __call__(self, tokens_BL: Array) -> Array:
        x_BLM = jnp.take(self.embedding, tokens_BL, axis=0) * self.features**0.5
        return x_BLM.astype(self.dtype)

    def attend(self, x_BTM: Array) -> Array:
        """Returns the logits x E^T, float32 [B, T, V]."""
        return tied_logits(x_BTM.astype(self.dtype), self.embedding.astype(self.dtype))


class SinusoidalPositions(nn.Module):
    """Fixed position vectors (Vaswani et al. 2017, section 3.5): positions -> [..., T, M] float32.

    In decoding, the cache counts the position in its leaf `position_embedder_index`, T5X's name for
    a counter that beams share.
    """

    features: int

    @nn.compact
    def __call__(self, length: int, positions_BT: Array | None, *, decode: bool = False) -> Array:
        position_T = jnp.arange(length)
        if decode:
            allocated = self.has_variable("cache", "position_embedder_index")
            index = self.variable("cache", "position_embedder_index", jnp.zeros, (), jnp.int32)
            if allocated:
                position_T = index.value[None]
                index.value = index.value + 1
        if positions_BT is None:
            positions_BT = position_T[None]
        half = self.features // 2
        frequency = 10000.0 ** (-jnp.arange(half) / half)
        angle = positions_BT[..., None] * frequency.reshape(1, 1, half)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def names_of(path: Any) -> list[str]:
    """Returns the dictionary keys of a tree path."""
    return [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]


def dropout(rate: float) -> nn.Dropout:
    """Returns dropout with one mask [B, 1, M] for all positions of a row, as in T5."""
    return nn.Dropout(rate, broadcast_dims=(-2,))


def constrain(x: Array, axes: Sequence[str | None]) -> Array:
    """Asks the partitioner for the sharding of these logical axes; no effect without a mesh."""
    return with_logical_constraint(x, tuple(axes))


class Table(nn.Module):
    """An array without a gradient that checkpoints keep, `<name>/table`.

    It is stored as a float32 parameter, exact for integers to 2^24, so that it is handled like all
    parameters. Optimizers do not change parameters of this name (`m4.train.optimizer.keep_tables`).
    """

    size: int
    make: Callable[[int], Any]  # size -> initial values
    dtype: Any = jnp.int32  # type of the returned values

    @nn.compact
    def __call__(self) -> Array:
        if self.has_variable("params", "table"):
            # `self.param` would run `make` again to compare shapes.
            table = self.get_variable("params", "table")
        else:
            # NumPy makes the values outside of the compiled program.
            make = np.zeros if _SHAPES_ONLY.get() else self.make
            table = partitioning.param_with_axes(
                "table",
                lambda key: jnp.asarray(np.asarray(make(self.size)), jnp.float32),
                axes=("unmodeled",),
                module=self,
            )
        return jax.lax.stop_gradient(table).astype(self.dtype)


# `Table.make` runs during tracing, and cannot know the trace's purpose.
_SHAPES_ONLY = ContextVar("shapes_only", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Marks traces of `init` that need only shapes: they make no `Table` and read no file."""
    before = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(before)

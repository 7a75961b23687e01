"""Feed-forward layers: a single one, activation(x Wi) Wo, and E of them as the experts."""

from collections.abc import Callable, Sequence
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from m4.model.layers import Array, Dense, Kernel, constrain, dropout
from m4.model.product import product as plain_product
from m4.settings import OneOf, SettingError

Product = Callable[[Array, Array], Array]

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu, "linear": lambda x: x}
Activation = Annotated[str, OneOf(tuple(ACTIVATIONS))]
# Each expert is initialised like one dense layer: the expert axis is not part of the fan-in.
expert_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))


def check_activations(setting: str, activations: Sequence[str]) -> None:
    """Raises SettingError unless there is at least one activation."""
    if not activations:
        raise SettingError(setting, activations, f"at least one of {', '.join(ACTIVATIONS)}")


def activate(parts: Sequence[Array], activations: Sequence[str]) -> Array:
    """Multiplies the activations of all parts.

    ("relu",) is a plain layer, ("gelu", "linear") gated GELU (Shazeer 2020, arXiv 2002.05202).
    """
    result = ACTIVATIONS[activations[0]](parts[0])
    for part, name in zip(parts[1:], activations[1:], strict=True):
        result = result * ACTIVATIONS[name](part)
    return result


def part_names(activations: Sequence[str]) -> list[str]:
    """Returns T5X's names of the inward matrices: wi, or wi_0 and wi_1 in a gated layer."""
    return ["wi"] if len(activations) == 1 else [f"wi_{i}" for i in range(len(activations))]


class FeedForward(nn.Module):
    """Layer x_BLM -> y_BLM of width F without biases, with dropout between the two products."""

    width: int
    activations: Sequence[str] = ("relu",)
    dropout_rate: float = 0.1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x_BLM: Array, *, deterministic: bool) -> Array:
        parts = [
            Dense(self.width, axes=("embed", "mlp"), dtype=self.dtype, name=name)(x_BLM)
            for name in part_names(self.activations)
        ]
        h_BLF = activate(parts, self.activations)
        h_BLF = dropout(self.dropout_rate)(h_BLF, deterministic=deterministic)
        h_BLF = constrain(h_BLF, ("batch", "length", "mlp"))
        return Dense(x_BLM.shape[-1], axes=("mlp", "embed"), dtype=self.dtype, name="wo")(h_BLF)


@struct.dataclass
class Experts:
    """E feed-forward layers as a tree of arrays; the first axis, experts, may be sharded."""

    inward: tuple[Array, ...]  # one array [E, M, F] per activation
    outward: Array  # [E, F, M]
    # Factors of dropout, 0 or 1 / (1 - rate), shared by all slots of an expert's group, as
    # `dropout` shares one among all positions of a row. None without dropout.
    keep_EG1F: Array | None = None
    # See `activate`.
    activations: tuple[str, ...] = struct.field(pytree_node=False, default=("relu",))

    def __call__(
        self,
        x: Array,
        *,
        product: Product = plain_product,
        spread: Callable[[Array], Array] = lambda keep_EG1F: keep_EG1F,
    ) -> Array:
        """Applies each expert to its rows, x_EGCM or in the layout of `product`.

        `spread` converts keep_EG1F to that layout.
        """
        h = activate([product(x, kernel) for kernel in self.inward], self.activations)
        if self.keep_EG1F is not None:
            h = h * spread(self.keep_EG1F)
        return product(h, self.outward)


class ExpertParameters(nn.Module):
    """Makes the experts' parameters, `experts/{wi or wi_0, wi_1, wo}/kernel`."""

    num_experts: int
    width: int
    activations: Sequence[str]
    dropout_rate: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, M: int, groups: int, *, deterministic: bool) -> Experts:
        """Returns the experts for tokens of width M in this number of groups."""
        inward = (self.num_experts, M, self.width)
        outward = (self.num_experts, self.width, M)
        kernels = [
            Kernel(inward, ("expert", "mlp_embed", "expert_mlp"), expert_init, name=name)()
            for name in part_names(self.activations)
        ]
        wo_EFM = Kernel(outward, ("expert", "expert_mlp", "mlp_embed"), expert_init, name="wo")()
        keep_EG1F = None
        if self.dropout_rate and not deterministic:
            ones = jnp.ones((self.num_experts, groups, 1, self.width), self.dtype)
            keep_EG1F = nn.Dropout(self.dropout_rate)(ones, deterministic=False)
            # Unsharded, its E * G * F numbers can be larger than everything else.
            keep_EG1F = constrain(keep_EG1F, ("expert", "expert_replicas", None, "expert_mlp"))
        return Experts(
            tuple(kernel.astype(self.dtype) for kernel in kernels),
            wo_EFM.astype(self.dtype),
            keep_EG1F,
            tuple(self.activations),
        )

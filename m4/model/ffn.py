"""The feed-forward layer: activation(x Wi) Wo, or gated (Shazeer 2020) with two activations."""

from collections.abc import Sequence
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from m4.model.layers import Array, Dense, constrain, dropout
from m4.settings import OneOf, SettingError

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "linear": lambda x: x,
}
Activation = Annotated[str, OneOf(tuple(ACTIVATIONS))]


def check_activations(setting: str, activations: Sequence[str]) -> None:
    """SettingError: there is none."""
    if not activations:
        raise SettingError(setting, activations, f"at least one of {', '.join(ACTIVATIONS)}")


def activate(parts: Sequence[Array], activations: Sequence[str]) -> Array:
    """Product of an activation of each part: ("relu",) is plain, ("gelu", "linear") gated GELU."""
    result = ACTIVATIONS[activations[0]](parts[0])
    for part, name in zip(parts[1:], activations[1:], strict=True):
        result = result * ACTIVATIONS[name](part)
    return result


def part_names(activations: Sequence[str]) -> list[str]:
    """T5X's names of the matrices that go in: wi, or wi_0, wi_1 for a gated layer."""
    if len(activations) == 1:
        return ["wi"]
    return [f"wi_{i}" for i in range(len(activations))]


class FeedForward(nn.Module):
    """x_BLM -> y_BLM through width F; no biases; dropout between the two products."""

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

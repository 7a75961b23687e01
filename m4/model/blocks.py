"""The layers of the two stacks, and how a stack runs them: one after the other, or as a scan.

A scanned stack compiles one block and not every layer: what makes deep models possible. Its
parameters are those of the layers, stacked: `unstack` takes them apart.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning

from m4.model.attention import Attention
from m4.model.layers import Array, RmsNorm, constrain, dropout
from m4.model.moe import MoeLayer

# What all layers of a stack are given: encoder {bias, mask, about}; decoder also {cross_mask,
# encoded}. See the layers for shapes.
Inputs = Mapping[str, Any]

# What the backward pass computes again instead of keeping it.
REMAT = {
    "none": None,
    # Everything in a layer but its input.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Everything but the results of products with weights.
    "products": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


class Mode(NamedTuple):
    """What a call compiles for."""

    deterministic: bool
    decode: bool = False


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward or experts; each normed before and added to its input."""

    attention: Callable[..., Attention]
    feed_forward: Callable[..., nn.Module]
    dropout_rate: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BLM: Array, inputs: Inputs, mode: Mode) -> Array:
        bias, mask_BLL, about = inputs["bias"], inputs["mask"], inputs["about"]
        deterministic = mode.deterministic
        drop = dropout(self.dropout_rate)
        h = RmsNorm(dtype=self.dtype, name="pre_attention_layer_norm")(x_BLM)
        h = self.attention(name="attention")(
            h, h, bias_1NQR=bias, mask_BQR=mask_BLL, deterministic=deterministic
        )
        x_BLM = x_BLM + drop(h, deterministic=deterministic)
        h = RmsNorm(dtype=self.dtype, name="pre_mlp_layer_norm")(x_BLM)
        h = apply_feed_forward(self.feed_forward, h, about, deterministic)
        x_BLM = x_BLM + drop(h, deterministic=deterministic)
        return constrain(x_BLM, ("batch", "length", "embed"))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output, then feed-forward or experts."""

    attention: Callable[..., Attention]
    feed_forward: Callable[..., nn.Module]
    dropout_rate: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTM: Array, inputs: Inputs, mode: Mode) -> Array:
        bias, mask_BTT, cross_mask_BTL = inputs["bias"], inputs["mask"], inputs["cross_mask"]
        encoded_BLM, (deterministic, decode) = inputs["encoded"], mode
        about = {**inputs["about"], "decode": decode}
        drop = dropout(self.dropout_rate)
        h = RmsNorm(dtype=self.dtype, name="pre_self_attention_layer_norm")(x_BTM)
        h = self.attention(name="self_attention")(
            h, h, bias_1NQR=bias, mask_BQR=mask_BTT, deterministic=deterministic, decode=decode
        )
        x_BTM = x_BTM + drop(h, deterministic=deterministic)
        h = RmsNorm(dtype=self.dtype, name="pre_cross_attention_layer_norm")(x_BTM)
        h = self.attention(name="encoder_decoder_attention")(
            h,
            encoded_BLM,
            mask_BQR=cross_mask_BTL,
            deterministic=deterministic,
            decode=decode,
            cross=True,
        )
        x_BTM = x_BTM + drop(h, deterministic=deterministic)
        h = RmsNorm(dtype=self.dtype, name="pre_mlp_layer_norm")(x_BTM)
        h = apply_feed_forward(self.feed_forward, h, about, deterministic)
        x_BTM = x_BTM + drop(h, deterministic=deterministic)
        return constrain(x_BTM, ("batch", "length", "embed"))


def apply_feed_forward(make, h_BLM, about: Mapping[str, Any], deterministic: bool) -> Array:
    """Calls the layer; only a mixture of experts asks what its tokens are (`about`)."""
    layer = make()
    if isinstance(layer, MoeLayer):
        return layer(h_BLM, **about, deterministic=deterministic)
    return layer(h_BLM, deterministic=deterministic)


class Block(nn.Module):
    """Consecutive layers `layer_0`, `layer_1`, ...: what a scanned stack repeats.

    Attributes: make: (index in the stack, name) -> layer. size: layers of a block.
    """

    make: Callable[[int, str | None], nn.Module]
    size: int

    @nn.compact
    def __call__(self, x_BLM: Array, inputs: Inputs, mode: Mode) -> tuple[Array, None]:
        for index in range(self.size):
            x_BLM = self.make(index, f"layer_{index}")(x_BLM, inputs, mode)
        return x_BLM, None


def remat(kind: type[nn.Module], policy: str, *, scanned: bool) -> type[nn.Module]:
    """`kind`, a module called as (x, inputs, mode), with less kept for its backward pass.

    policy: a name of `REMAT`.
    """
    if policy == "none":
        return kind
    # Argument 0 is self; in a scan nothing can be merged with the forward pass anyway.
    return nn.remat(kind, policy=REMAT[policy], prevent_cse=not scanned, static_argnums=(3,))


def scanned(
    make: Callable[[int, str | None], nn.Module], layers: int, size: int, policy: str, name: str
) -> nn.Module:
    """A stack of `layers` layers as one scan over blocks of `size`, which divides them."""
    assert layers % size == 0
    over = partitioning.scan_with_axes(
        remat(Block, policy, scanned=True),
        variable_axes={"params": 0, "cache": 0, "intermediates": 0, "explained": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=cast(Any, (nn.broadcast, nn.broadcast)),  # flax's stub says int
        length=layers // size,
        axis_name="layers",
    )
    return over(make, size, name=name)


def unstack(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of scanned stacks -> those of the same layers one after the other.

    `encoder_blocks/layer_1/...` [n, ...] becomes `encoder_1`, `encoder_3`, ... with blocks of two.
    """
    result: dict[str, Any] = {}
    for name, tree in params.items():
        if not name.endswith("_blocks"):
            result[name] = tree
            continue
        stack = name.removesuffix("_blocks")
        for index in range(len(tree)):
            layer = tree[f"layer_{index}"]
            blocks = jax.tree.leaves(layer)[0].shape[0]
            for block in range(blocks):
                part = jax.tree.map(functools.partial(_at, block), layer)
                result[f"{stack}_{block * len(tree) + index}"] = part
    return result


def _at(index: int, leaf: Array) -> Array:
    return leaf[index]

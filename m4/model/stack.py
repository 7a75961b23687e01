"""The layers of encoder and decoder, and stacks of them, as separate layers or as a scan.

A scanned stack compiles one block instead of every layer, which makes deep models possible. Its
parameters are the stacked parameters of the layers; `unstack` separates them.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning

from m4.model.attention import Attention
from m4.model.layers import Array, RmsNorm, constrain, dropout
from m4.model.moe import MoeLayer

# Inputs of all layers of a stack: {bias, mask, about}, and for the decoder also {cross_mask,
# encoded}. `about` is for mixtures of experts. The layers show the shapes.
Inputs = Mapping[str, Any]

# Policies of recomputation in the backward pass.
REMAT = {
    "none": None,
    # Keeps only a layer's input.
    "full": jax.checkpoint_policies.nothing_saveable,
    # Also keeps results of products with weights, but not of experts, which have a batch axis.
    "products": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


class Mode(NamedTuple):
    """Static options of a call."""

    deterministic: bool
    decode: bool = False


class DecoderLayer(nn.Module):
    """A decoder layer: self-attention, cross-attention, then feed-forward or experts.

    Each part has a norm before it and a residual.
    """

    attention: Callable[..., Attention]
    feed_forward: Callable[..., nn.Module]
    dropout_rate: float
    dtype: jnp.dtype
    cross: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x_BTM: Array, inputs: Inputs, mode: Mode) -> Array:
        drop = dropout(self.dropout_rate)

        def normed(name: str) -> Array:
            return RmsNorm(dtype=self.dtype, name=f"pre_{name}_layer_norm")(x_BTM)

        own = "self_attention" if self.cross else "attention"
        h, masks = normed(own), {"bias": inputs["bias"], "mask_BQR": inputs["mask"]}
        h = self.attention(name=own)(h, h, **masks, **mode._asdict())
        x_BTM = x_BTM + drop(h, deterministic=mode.deterministic)
        if self.cross:
            h, there = normed("cross_attention"), {"mask_BQR": inputs["cross_mask"], "cross": True}
            attend = self.attention(name="encoder_decoder_attention")
            h = attend(h, inputs["encoded"], **there, **mode._asdict())
            x_BTM = x_BTM + drop(h, deterministic=mode.deterministic)
        h, layer = normed("mlp"), self.feed_forward()
        # Only a mixture of experts gets `about`.
        about = {**inputs["about"], "decode": mode.decode} if isinstance(layer, MoeLayer) else {}
        h = layer(h, **about, deterministic=mode.deterministic)
        x_BTM = x_BTM + drop(h, deterministic=mode.deterministic)
        return constrain(x_BTM, ("batch", "length", "embed"))


class EncoderLayer(DecoderLayer):
    """An encoder layer: self-attention, then feed-forward or experts."""

    cross: ClassVar[bool] = False


class Block(nn.Module):
    """Consecutive layers `layer_0`, `layer_1`, ..., which a scanned stack repeats."""

    make: Callable[[int, str | None], nn.Module]  # (index in the stack, name) -> layer
    size: int

    @nn.compact
    def __call__(self, x_BLM: Array, inputs: Inputs, mode: Mode) -> tuple[Array, None]:
        for index in range(self.size):
            x_BLM = self.make(index, f"layer_{index}")(x_BLM, inputs, mode)
        return x_BLM, None


def remat(kind: type[nn.Module], policy: str, *, scanned: bool) -> type[nn.Module]:
    """Returns a class of modules (x, inputs, mode) that keeps less for its backward pass."""
    if policy == "none":
        return kind
    # Argument 0 is self. In a scan, XLA cannot merge the recomputation with the forward pass, so
    # nothing must prevent that.
    return nn.remat(kind, policy=REMAT[policy], prevent_cse=not scanned, static_argnums=(3,))


def scanned(
    make: Callable[[int, str | None], nn.Module], layers: int, size: int, policy: str, name: str
) -> nn.Module:
    """Returns a stack of `layers` layers as one scan over blocks of `size` layers."""
    assert layers % size == 0
    over = partitioning.scan_with_axes(
        remat(Block, policy, scanned=True),
        variable_axes={"params": 0, "cache": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=cast(Any, (nn.broadcast, nn.broadcast)),  # flax's stub says int
        length=layers // size,
        axis_name="layers",
    )
    return over(make, size, name=name)


def unstack(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of scanned stacks as those of separate layers.

    With blocks of two, `encoder_blocks/layer_1/...` [n, ...] becomes `encoder_1`, `encoder_3`, ...
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
                part = jax.tree.map(lambda leaf, at=block: leaf[at], layer)
                result[f"{stack}_{block * len(tree) + index}"] = part
    return result

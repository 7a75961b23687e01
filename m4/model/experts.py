"""The experts: E feed-forward layers side by side; a tree of arrays that dispatch may split."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.linen import partitioning

from m4.model.ffn import activate, part_names
from m4.model.layers import constrain
from m4.model.product import expert_product

Array = jax.Array
Product = Callable[[Array, Array], Array]

expert_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)  # each expert is initialised as one dense layer: the expert axis is no fan-in


@struct.dataclass
class Experts:
    """What dispatch calls: experts(x_EGCM) -> y_EGCM. Every array has the expert axis first.

    Attributes:
        inward: one [E, M, F] an activation. outward: [E, F, M].
        keep_EG1F: dropout's factors (0 or 1 / (1 - rate)), one for all slots of an expert's group,
            as `dropout` has one for all positions of a row; None: no dropout.
        activations: see `m4.model.ffn.activate`.
    """

    inward: tuple[Array, ...]
    outward: Array
    keep_EG1F: Array | None = None
    activations: tuple[str, ...] = struct.field(pytree_node=False, default=("relu",))

    def __call__(
        self,
        x: Array,
        *,
        product: Product = expert_product,
        spread: Callable[[Array], Array] = lambda keep_EG1F: keep_EG1F,
    ) -> Array:
        """x in the layout that `product` multiplies; `spread` brings keep_EG1F into it."""
        h = activate([product(x, kernel) for kernel in self.inward], self.activations)
        if self.keep_EG1F is not None:
            h = h * spread(self.keep_EG1F)
        return product(h, self.outward)


class ExpertKernel(nn.Module):
    """A stack of matrices [E, in, out]: `experts/<name>/kernel`, sharded over the expert axis."""

    shape: tuple[int, int, int]
    axes: tuple[str, str, str]

    @nn.compact
    def __call__(self) -> Array:
        return partitioning.param_with_axes(
            "kernel", expert_init, self.shape, jnp.float32, axes=self.axes, module=self
        )


class ExpertParameters(nn.Module):
    """Makes the parameters: `experts/{wi or wi_0, wi_1, wo}/kernel`."""

    num_experts: int
    width: int
    activations: Sequence[str]
    dropout_rate: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, M: int, groups: int, *, deterministic: bool) -> Experts:
        inward = (self.num_experts, M, self.width)
        outward = (self.num_experts, self.width, M)
        kernels = [
            ExpertKernel(inward, ("expert", "mlp_embed", "expert_mlp"), name=name)()
            for name in part_names(self.activations)
        ]
        wo_EFM = ExpertKernel(outward, ("expert", "expert_mlp", "mlp_embed"), name="wo")()
        keep_EG1F = None
        if self.dropout_rate and not deterministic:
            ones = jnp.ones((self.num_experts, groups, 1, self.width), self.dtype)
            keep_EG1F = nn.Dropout(self.dropout_rate)(ones, deterministic=False)
            # Sharded: whole, E * G * F numbers, it can be larger than all else.
            keep_EG1F = constrain(keep_EG1F, ("expert", "expert_replicas", None, "expert_mlp"))
        return Experts(
            tuple(kernel.astype(self.dtype) for kernel in kernels),
            wo_EFM.astype(self.dtype),
            keep_EG1F,
            tuple(self.activations),
        )

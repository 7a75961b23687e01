"""The mixture-of-experts layer: groups -> gate -> transport -> experts (GShard, section 2.2)."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning

from m4.model.dispatch import Transport
from m4.model.dispatch.gather import gather
from m4.model.ffn import activate
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.layers import Array, constrain
from m4.model.routing import Gate, Tokens, expert_capacity

expert_init = nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)  # each expert is initialised as one dense layer: the expert axis is no fan-in


class ExpertKernel(nn.Module):
    """A stack of matrices [E, in, out]: `experts/<name>/kernel`, sharded over the expert axis."""

    shape: tuple[int, int, int]
    axes: tuple[str, str, str]

    @nn.compact
    def __call__(self) -> Array:
        return partitioning.param_with_axes(
            "kernel", expert_init, self.shape, jnp.float32, axes=self.axes, module=self
        )


class Experts(nn.Module):
    """E feed-forward layers side by side as batched products: [E, G, C, M] -> the same shape."""

    num_experts: int
    width: int
    activations: Sequence[str]
    dropout_rate: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_EGCM: Array, *, deterministic: bool) -> Array:
        M = x_EGCM.shape[-1]
        count = len(self.activations)
        names = ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]
        inward = (self.num_experts, M, self.width)
        kernels = [
            ExpertKernel(inward, ("expert", "embed", "expert_mlp"), name=name)() for name in names
        ]
        outward = (self.num_experts, self.width, M)
        wo_EFM = ExpertKernel(outward, ("expert", "expert_mlp", "embed"), name="wo")()
        parts = [jnp.einsum("EGCM,EMF->EGCF", x_EGCM, w.astype(self.dtype)) for w in kernels]
        h_EGCF = activate(parts, self.activations)
        # One mask for all seats of an expert's group, as `dropout` does for a row's positions.
        h_EGCF = nn.Dropout(self.dropout_rate, broadcast_dims=(-2,))(
            h_EGCF, deterministic=deterministic
        )
        h_EGCF = constrain(h_EGCF, ("expert", None, None, "expert_mlp"))
        return jnp.einsum("EGCF,EFM->EGCM", h_EGCF, wo_EFM.astype(self.dtype))


class MoeLayer(nn.Module):
    """A mixture of experts in place of a feed-forward layer: x_BLM -> y_BLM.

    Tokens without a seat get 0 (the residual connection carries them). Sown into `intermediates`
    are T5X's five metrics and the gate's own.

    Attributes:
        num_experts: E. width: F of each expert.
        group_tokens: largest S; the largest divisor of B*L up to it is used. 0: one group.
        train_capacity_factor: times 2S/E seats an expert (`routing.expert_capacity`).
        eval_capacity_factor: the same outside training; None never drops a token (C = S), so that
            a sentence's translation does not depend on its batch.
        gate: the router (`m4.model.gates`). transport: the road (`m4.model.dispatch`).
    """

    num_experts: int
    width: int
    group_tokens: int = 1024
    train_capacity_factor: float = 1.25
    eval_capacity_factor: float | None = None
    gate: Gate = top2_gshard
    transport: Transport = gather
    activations: Sequence[str] = ("relu",)
    dropout_rate: float = 0.1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x_BLM: Array, mask_BL: Array, ids_BL: Array | None = None, *, deterministic: bool
    ) -> Array:
        B, L, M = x_BLM.shape
        S = group_size(B * L, self.group_tokens)
        x_GSM = constrain(x_BLM.reshape(-1, S, M), ("batch", "length", "embed"))
        mask_GS = mask_BL.reshape(-1, S)

        def score(name: str) -> Array:
            kernel = RouterKernel((M, self.num_experts), name=name)()
            logits_GSE = jnp.einsum("GSM,ME->GSE", x_GSM.astype(jnp.float32), kernel)
            return constrain(logits_GSE, ("batch", None, None))

        train = not deterministic
        factor = self.train_capacity_factor if train else self.eval_capacity_factor
        capacity = S if factor is None else expert_capacity(S, self.num_experts, factor)
        tokens = Tokens(
            score=score,
            mask_GS=mask_GS,
            ids_GS=None if ids_BL is None else ids_BL.reshape(-1, S),
            # T5X knows one stream of random numbers.
            rng=self.make_rng("dropout") if train and self.has_rng("dropout") else None,
            train=train,
        )
        routing = self.gate(tokens, self.num_experts, capacity)
        experts = Experts(
            self.num_experts,
            self.width,
            activations=self.activations,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            name="experts",
        )
        y_GSM = self.transport(
            x_GSM.astype(self.dtype), routing, lambda x: experts(x, deterministic=deterministic)
        )
        y_GSM = constrain(y_GSM, ("batch", "length", "embed"))
        self._sow(routing)
        return y_GSM.reshape(B, L, M)

    def _sow(self, routing) -> None:
        seated = jnp.sum(routing.seat_GSK >= 0)
        seats = routing.num_experts * routing.capacity * routing.seat_GSK.shape[0]
        values = {
            # T5X averages exactly these five (its MoeEncoderDecoderModel refuses without them).
            "auxiliary_loss": routing.aux_loss,
            "router_z_loss": routing.z_loss,
            "fraction_tokens_left_behind": routing.metrics["nowhere"],
            "expert_usage": seated / seats,
            "router_confidence": jnp.sum(routing.weight_GSK) / jnp.maximum(seated, 1),
            **routing.metrics,
        }
        for name, value in values.items():
            self.sow("intermediates", name, jnp.asarray(value, jnp.float32))


class RouterKernel(nn.Module):
    """The gate's matrix W_g [M, E], float32, without bias: `<name>/kernel`."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> Array:
        return partitioning.param_with_axes(
            "kernel",
            nn.initializers.normal(0.02),
            self.shape,
            jnp.float32,
            axes=("embed", "unmodeled"),
            module=self,
        )


def group_size(tokens: int, largest: int) -> int:
    """The largest divisor of `tokens` that is at most `largest` (0: all tokens, one group)."""
    if largest <= 0 or largest >= tokens:
        return tokens
    return next(size for size in range(largest, 0, -1) if tokens % size == 0)


def mean_metrics(intermediates) -> dict[str, Array]:
    """Mean over layers of everything sown: {"auxiliary_loss": scalar, ..., "load_E": [E]}."""
    found: dict[str, list[Array]] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        found.setdefault(names[-1], []).append(value)
    return {name: jnp.mean(jnp.stack(values), axis=0) for name, values in found.items()}

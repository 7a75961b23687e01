"""The mixture-of-experts layer: groups -> gate -> dispatch -> experts (GShard, section 2.2)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from m4.model.dispatch import Transport
from m4.model.dispatch.blocks import blocks
from m4.model.dispatch.gather import gather
from m4.model.experts import ExpertParameters
from m4.model.ffn import Activation, check_activations
from m4.model.gate_parameters import RouterKernel, Table
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.layers import Array, DType, constrain
from m4.model.product import full_product
from m4.model.routing import (
    CAPACITY_RULES,
    CapacityFactor,
    Gate,
    Routing,
    Tokens,
    expert_capacity,
)
from m4.settings import FROM_NOW_ON, Between, Count, OneOf, Rate, SettingError, Size, checked


@checked
class MoeLayer(nn.Module):
    """A mixture of experts in place of a feed-forward layer: x_BLM -> y_BLM.

    Tokens without a slot get 0 (the residual connection carries them). Sown into `intermediates`
    are T5X's five metrics, the gate's own and, with `directions`, who went where: `assigned_DE`,
    assigned choices by translation direction and expert; where directions are unknown
    (decoding), `chosen_BLK`, the expert of each choice, -1 without a slot, for the caller to count.

    Attributes:
        num_experts: E.
        mlp_width: F of each expert. activations: see `m4.model.ffn.activate`, e.g. ("silu",
            "linear"), Mixtral's SwiGLU. dropout_rate: within the experts. In a `Transformer` None
            is the model's own; elsewhere these three must be given.
        group_tokens: largest S; the largest divisor of B*L up to it is used. 0: one group.
        train_capacity_factor: times K*S/E slots an expert (`routing.expert_capacity`); None never
            drops a token.
        eval_capacity_factor, decode_capacity_factor: the same outside training, for whole
            sentences and in decoding one position after the other; with None a sentence's
            translation does not depend on its batch.
        capacity_rule: how a fraction of a slot is rounded (`routing.CAPACITY_RULES`).
        gate: the router (`m4.model.gates`).
        dispatch: how tokens reach their experts and come back (`m4.model.dispatch`).
        dropless_dispatch: the same where nothing is dropped, because the capacity factor is None.
        output_masking: p; in training each choice's expert output is 0 with probability p, else
            divided by 1 - p: the expert output masking of NLLB (arXiv 2207.04672).
        causal: in a decoder; gates that look at later tokens refuse.
        vocab_size: V, for gates that route by token id.
        directions: number of translation directions whose tokens are counted by expert; 0: none.
            It changes neither parameters nor results.
    """

    num_experts: Annotated[int, Between(1, 2**16)]
    mlp_width: Size | None = None
    group_tokens: Annotated[Count, FROM_NOW_ON] = 1024
    train_capacity_factor: Annotated[CapacityFactor | None, FROM_NOW_ON] = 1.25
    eval_capacity_factor: Annotated[CapacityFactor | None, FROM_NOW_ON] = None
    decode_capacity_factor: Annotated[CapacityFactor | None, FROM_NOW_ON] = None
    capacity_rule: Annotated[str, OneOf(tuple(CAPACITY_RULES)), FROM_NOW_ON] = "lingvo"
    gate: Gate = top2_gshard
    dispatch: Annotated[Transport, FROM_NOW_ON] = gather
    dropless_dispatch: Annotated[Transport, FROM_NOW_ON] = blocks
    activations: Sequence[Activation] | None = None
    dropout_rate: Annotated[Rate | None, FROM_NOW_ON] = None
    output_masking: Annotated[Rate, FROM_NOW_ON] = 0.0
    causal: bool = False
    vocab_size: Count = 0
    directions: Count = 0
    dtype: Annotated[DType, FROM_NOW_ON] = jnp.float32

    def __post_init__(self) -> None:
        if self.activations is not None:  # gin gives lists, and a module must be hashable
            self.activations = tuple(self.activations)
            check_activations("MoeLayer.activations", self.activations)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x_BLM: Array,
        mask_BL: Array,
        ids_BL: Array | None = None,
        direction_BL: Array | None = None,
        *,
        step: Array | None = None,
        deterministic: bool,
        decode: bool = False,
    ) -> Array:
        """[B, L, M] -> [B, L, M]; a token without a slot gets zeros.

        Args:
            mask_BL: True for real tokens; padding gets no slot.
            ids_BL, direction_BL: token ids and directions, for gates that read them.
            step: of training, for gates that anneal. deterministic: no dropout, no random choices.
            decode: one step of a search, with `decode_capacity_factor`.
        """
        B, L, _ = x_BLM.shape
        train = not deterministic
        factor = self.train_capacity_factor if train else self.eval_capacity_factor
        if decode:
            factor = self.decode_capacity_factor
        S = self._group_tokens(B, L, whole_rows=factor is None and not train)
        mask_GS, x_GSM = _grouped(mask_BL, S), _grouped(x_BLM, S)
        # 0 * NaN is NaN: what padding holds would reach the sums of losses and the masks' products.
        x_GSM = jnp.where(mask_GS[..., None], x_GSM, 0)
        x_GSM = constrain(x_GSM, ("batch", "length", "embed"))
        tokens = Tokens(
            score=functools.partial(self._score, x_GSM),
            mask_GS=mask_GS,
            ids_GS=None if ids_BL is None else _grouped(ids_BL, S),
            language_GS=None if direction_BL is None else _grouped(direction_BL, S),
            step=step,
            # T5X knows one stream of random numbers.
            rng=self.make_rng("dropout") if train and self.has_rng("dropout") else None,
            table=self._table,
            # `init` may come without random numbers for dropout.
            train=train and not self.is_initializing(),
            causal=self.causal,
        )

        def capacity(choices: int) -> int:
            if factor is None:
                return S
            return expert_capacity(S, self.num_experts, factor, choices, self.capacity_rule)

        routing = self.gate(tokens, self.num_experts, capacity)
        dispatch = self.dropless_dispatch if factor is None else self.dispatch
        carried = self._mask_outputs(routing) if tokens.rng is not None else routing
        y_GSM = self._carry(x_GSM.astype(self.dtype), carried, dispatch, deterministic)
        if not self.is_initializing():  # which expert has each token, where it is asked for
            self.sow("explained", "expert_GSK", _assigned(routing))
        self._sow(routing, tokens)
        if self.directions and tokens.language_GS is not None:
            self._sow_choices(routing, tokens.language_GS)
        return y_GSM.reshape(x_BLM.shape)

    def _group_tokens(self, B: int, L: int, *, whole_rows: bool) -> int:
        """S. Where nothing is dropped, groups decide nothing for a causal gate; a row a group makes
        the choices of one that is not causal independent of the other rows."""
        if whole_rows:
            return L
        S = group_size(B * L, self.group_tokens)
        if min(self.group_tokens, B * L) > 4 * S:
            # With a token or two a group, every token has a slot at every expert.
            allowed = f"a number of which a divisor of the {B * L} tokens is at least a quarter"
            raise SettingError("MoeLayer.group_tokens", self.group_tokens, allowed)
        return S

    def _mask_outputs(self, routing: Routing) -> Routing:
        """With weights of 0 where an expert's output does not count; slots stay taken."""
        if not self.output_masking:
            return routing
        keep = 1 - self.output_masking
        keeps_GSK = jax.random.bernoulli(self.make_rng("dropout"), keep, routing.weight_GSK.shape)
        weight_GSK = jnp.where(keeps_GSK, routing.weight_GSK / keep, 0.0)
        shortcut = routing.shortcut
        if shortcut is not None:
            shortcut = shortcut[0], self._mask_outputs(shortcut[1])
        return dataclasses.replace(routing, weight_GSK=weight_GSK, shortcut=shortcut)

    def _carry(
        self, x_GSM: Array, routing: Routing, dispatch: Transport, deterministic: bool
    ) -> Array:
        """Tokens through their experts: y_GSM."""
        experts = ExpertParameters(
            self.num_experts,
            _given(self, "mlp_width"),
            activations=_given(self, "activations"),
            dropout_rate=_given(self, "dropout_rate"),
            dtype=self.dtype,
            name="experts",
        )(x_GSM.shape[-1], x_GSM.shape[0], deterministic=deterministic)
        # Parameters do not depend on the dispatch, and the few tokens that they are made with need
        # not divide over the devices.
        dispatch = gather if self.is_initializing() else dispatch
        if routing.shortcut is None:
            y_GSM = dispatch(x_GSM, routing, experts)
        else:
            use, shorter = routing.shortcut
            y_GSM = jax.lax.cond(
                use,
                lambda x: dispatch(x, shorter, experts),
                lambda x: dispatch(x, routing, experts),
                x_GSM,
            )
        return constrain(y_GSM, ("batch", "length", "embed"))

    def _score(
        self,
        x_GSM: Array,
        name: str,
        *,
        init: str = "normal",
        jitter: float = 0.0,
        key: Array | None = None,
    ) -> Array:
        """See `m4.model.routing.RouterScore`."""
        x_GSM = x_GSM.astype(jnp.float32)
        kernel_ME = RouterKernel((x_GSM.shape[-1], self.num_experts), init, name=name)()
        if jitter:
            assert key is not None, "jitter needs random numbers"
            x_GSM = x_GSM * jax.random.uniform(
                key, x_GSM.shape, minval=1 - jitter, maxval=1 + jitter
            )
        logits_GSE = full_product("GSM,ME->GSE", x_GSM, kernel_ME)
        return constrain(logits_GSE, ("batch", None, None))

    def _table(self, name: str, make: Callable[[int], Any]) -> Array:
        """An int32 array that is made once, by make(V), and then comes from the checkpoint."""
        assert self.vocab_size > 0, "a table needs the vocabulary's size"
        return Table(self.vocab_size, make, name=name)()

    def _sow(self, routing: Routing, tokens: Tokens) -> None:
        assigned = jnp.sum(routing.position_GSK >= 0)
        slots = routing.num_experts * routing.capacity * routing.position_GSK.shape[0]
        values = {
            # T5X averages these and `fraction_tokens_left_behind`, which every gate has: exactly
            # five (its MoeEncoderDecoderModel refuses without them).
            "auxiliary_loss": routing.aux_loss,
            "router_z_loss": routing.z_loss,
            "expert_usage": assigned / slots,
            "router_confidence": routing.confidence(),
            **routing.metrics,
        }
        for name, value in values.items():
            self.sow("intermediates", name, jnp.asarray(value, jnp.float32))

    def _sow_choices(self, routing: Routing, language_GS: Array) -> None:
        assigned_GSK = routing.position_GSK >= 0
        # On CPUs quicker than the product of one-hots, which writes [tokens, D * E].
        D, E = self.directions, self.num_experts
        cell_GSK = language_GS[..., None] * E + routing.expert_GSK
        cell_J = jnp.where(assigned_GSK, cell_GSK, D * E).reshape(-1)  # D*E is outside: not counted
        count_J = jax.ops.segment_sum(jnp.ones_like(cell_J), cell_J, num_segments=D * E)
        self.sow("intermediates", "assigned_DE", count_J.reshape(D, E))


def _assigned(routing: Routing) -> Array:
    """[G, S, K]: the expert of each choice, -1 without a slot."""
    return jnp.where(routing.position_GSK >= 0, routing.expert_GSK, -1)


def _given(layer: MoeLayer, name: str) -> Any:
    if (value := getattr(layer, name)) is None:
        raise SettingError(f"MoeLayer.{name}", value, "given, for a layer outside a Transformer")
    return value


@dataclasses.dataclass(frozen=True)
class MoeFactory:
    """Makes layers like `layer`, with other arguments where they are given.

    A model keeps this of the function that it is given: gin's bindings are those of the time when
    the model is made, and equal models are equal keys of jit's cache.
    """

    layer: MoeLayer

    @classmethod
    def of(cls, make: Callable[..., MoeLayer], setting: str) -> "MoeFactory":
        """SettingError, which names the `setting`: it is no function that makes layers."""
        if isinstance(make, cls):
            return make
        wanted = "a function that makes a MoeLayer, such as MoeLayer itself"
        if isinstance(make, nn.Module) or not callable(make):
            raise SettingError(setting, make, wanted)
        if not isinstance(layer := make(parent=None), MoeLayer):
            raise SettingError(setting, make, wanted)
        return cls(layer)

    def __call__(self, **options: Any) -> MoeLayer:
        fields = [field.name for field in dataclasses.fields(self.layer) if field.init]
        kept = {name: getattr(self.layer, name) for name in fields if name not in _PLACE}
        return type(self.layer)(**{**kept, **options})


_PLACE = ("parent", "name")  # flax's own fields


def _grouped(x_BL: Array, group_tokens: int) -> Array:
    """[B, L, ...] -> [G, S, ...]."""
    return x_BL.reshape(-1, group_tokens, *x_BL.shape[2:])


def group_size(tokens: int, largest: int) -> int:
    """The largest divisor of `tokens` that is at most `largest` (0: all tokens, one group)."""
    if largest <= 0 or largest >= tokens:
        return tokens
    return next(size for size in range(largest, 0, -1) if tokens % size == 0)


# Sown next to the metrics: counts, which have no mean.
CHOICES = ("assigned_DE",)


def mean_metrics(intermediates) -> dict[str, Array]:
    """Mean over layers of every metric: {"auxiliary_loss": scalar, ..., "load_E": [E]}."""
    found: dict[str, list[Array]] = {}
    for metrics in layer_metrics(intermediates).values():
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: jnp.mean(jnp.stack(values), axis=0) for name, values in found.items()}


def layer_metrics(intermediates) -> dict[str, dict[str, Array]]:
    """Layer ("encoder_1", "decoder_1", ...) -> the metrics that it sowed."""
    found: dict[str, dict[str, Array]] = {}
    for layer, name, value in _sown(intermediates):
        if name not in CHOICES:
            found.setdefault(layer, {})[name] = value
    return found


def sown_choices(intermediates, name: str) -> dict[str, Array]:
    """Layer -> what it sowed under a name of `CHOICES`."""
    return {layer: value for layer, sown, value in _sown(intermediates) if sown == name}


def _sown(intermediates) -> list[tuple[str, str, Array]]:
    """(layer, name, value) of everything sown; a layer's name is its path without "moe".

    What a scanned stack sowed, [blocks, ...], is taken apart: a block ends with its MoE layer.
    """
    found = []
    for path, value in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        *layer, name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        layer = [part for part in layer if part != "moe"]
        if len(layer) == 2 and layer[0].endswith("_blocks"):
            stack, size = layer[0].removesuffix("_blocks"), int(layer[1].removeprefix("layer_")) + 1
            for block in range(value.shape[0]):
                found.append((f"{stack}_{(block + 1) * size - 1}", name, value[block]))
        else:
            found.append(("/".join(layer), name, value))
    return found

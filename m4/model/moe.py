"""The mixture-of-experts layer: groups, gate, dispatch, experts (GShard, section 2.2)."""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from m4.model import routing as plans
from m4.model.dispatch import Transport
from m4.model.dispatch.dropless import dropless
from m4.model.dispatch.gather import gather
from m4.model.feed_forward import Activation, ExpertParameters, FeedForward, check_activations
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.layers import Array, DType, Kernel, Table, constrain, names_of
from m4.model.product import full_product
from m4.model.routing import CapacityFactor, Gate, Routing, Tokens
from m4.settings import MUTABLE, Between, Count, Given, OneOf, Rate, SettingError, Size, checked

# Initial router matrices by name; docs/gates.md says which gates use them.
ROUTER_INITS = {
    "normal": nn.initializers.normal(0.02),  # flaxformer
    "zeros": nn.initializers.zeros,  # Shazeer et al. 2017: balanced at first, noise decides
    "orthogonal": nn.initializers.orthogonal(0.1),  # BASE's centroids (fairseq)
}


@checked
class MoeLayer(nn.Module):
    """A mixture of experts instead of a feed-forward layer: x_BLM -> y_BLM.

    Tokens without a slot get 0 (the residual connection carries them), plus the shared layer's
    output. The layer sows metrics into `intermediates` (docs/model.md): T5X's five as float32, the
    others of `routing.make_routing`, `assigned_DE` (int32 choices with a slot) if `directions` are
    counted, and for a gate with a bias the input of `move_biases`.

    Attributes:
        num_experts: Number of experts, E.
        mlp_width: Width F of each expert. In a `Transformer`, it defaults to the model's; elsewhere
            it must be given, and so must `activations` and `dropout_rate`.
        group_tokens: Maximum tokens of a group, S: the largest divisor of B*L up to it is used. 0
            makes one group. Outside training with a capacity factor of None, a row is a group.
        train_capacity_factor: Number of slots of an expert, in units of K*S/E
            (`routing.expert_capacity`). None never drops a token.
        eval_capacity_factor: Capacity factor outside training, for whole sentences. With None, a
            sentence's translation does not depend on its batch.
        decode_capacity_factor: Capacity factor in decoding, one position at a time.
        capacity_rule: Rounding of a fraction of a slot (`routing.CAPACITY_RULES`).
        gate: Router (`m4.model.gates`).
        dispatch: Transport of tokens to their experts and back (`m4.model.dispatch`), if the
            capacity factor is a number.
        dropless_dispatch: Transport if the capacity factor is None and nothing is dropped.
        shared_width: Width F of a feed-forward layer that all tokens pass in addition, like the
            shared experts of DeepSeekMoE (arXiv 2401.06066) taken together; 0 means none.
        activations: See `m4.model.feed_forward.activate`; ("silu", "linear") is Mixtral's SwiGLU.
        dropout_rate: Dropout within the experts.
        causal: Whether the layer is in a decoder, which gates that look at later tokens refuse.
        vocab_size: V, for gates that route by token id.
        directions: Number of translation directions whose tokens are counted by expert.
        tasks: Task of each direction, for gates by task. Defaults to one task per direction.
        dtype: Type of the experts' products.
    """

    num_experts: Annotated[int, Between(1, 2**16)]
    mlp_width: Size | None = None
    group_tokens: Count = 1024
    train_capacity_factor: CapacityFactor | None = 1.25
    eval_capacity_factor: CapacityFactor | None = None
    decode_capacity_factor: CapacityFactor | None = None
    capacity_rule: Annotated[str, OneOf(tuple(plans.CAPACITY_RULES))] = "lingvo"
    gate: Gate = top2_gshard
    dispatch: Annotated[Transport, MUTABLE] = gather
    dropless_dispatch: Annotated[Transport, MUTABLE] = dropless
    shared_width: Count = 0
    activations: Sequence[Activation] | None = None
    dropout_rate: Rate | None = None
    causal: Annotated[bool, Given("the layer's place")] = False
    vocab_size: Annotated[Count, Given("the vocabulary")] = 0
    directions: Annotated[Count, Given("corpus.CorpusSpec.mixture")] = 0
    tasks: Annotated[Sequence[Count], Given("transformer.Transformer.tasks")] = ()
    dtype: Annotated[DType, Given("transformer.Transformer.dtype")] = jnp.float32

    def __post_init__(self) -> None:
        if self.activations is not None:  # gin gives lists, and a module must be hashable
            self.activations = tuple(self.activations)
            check_activations("MoeLayer.activations", self.activations)
        self.tasks = tuple(self.tasks)
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
        """Returns y_BLM; padding gets zeros.

        Args:
            mask_BL: True for real tokens; padding gets no slot.
            ids_BL: Token ids, for gates that route by them.
            direction_BL: Translation direction of each token, int32, for counts and gates.
            step: Number of training steps done, for gates that anneal.
            deterministic: False in training, with dropout, noise and `train_capacity_factor`.
            decode: True in a step of a search, with `decode_capacity_factor`.

        Raises:
            TypeError: The mask is not bool.
            ValueError: `x_BLM` and the mask do not fit.
            SettingError: A setting does not fit the tokens, or the gate refuses its place.
        """
        if x_BLM.ndim != 3 or mask_BL.shape != x_BLM.shape[:2]:
            said = f"x_BLM {[*x_BLM.shape]}, mask_BL {[*mask_BL.shape]}: must be [batch, length, "
            raise ValueError(f"{said}width] and [batch, length]")
        if mask_BL.dtype != bool:
            raise TypeError(f"mask_BL: must be bool, True for real tokens; it is {mask_BL.dtype}")
        B, L, _ = x_BLM.shape
        train = not deterministic
        factor = self.train_capacity_factor if train else self.eval_capacity_factor
        factor = self.decode_capacity_factor if decode else factor
        # If nothing is dropped, groups do not matter for a causal gate; with a group for each row,
        # the choices of any other gate do not depend on other rows.
        whole_rows = factor is None and not train
        S = L if whole_rows else group_size(B * L, self.group_tokens)
        if not whole_rows and min(self.group_tokens, B * L) > 4 * S:
            # In groups of a token or two, every token would have a slot at every expert.
            allowed = f"a number of which a divisor of the {B * L} tokens is at least a quarter"
            raise SettingError("MoeLayer.group_tokens", self.group_tokens, allowed)
        mask_GS, x_GSM = _grouped(mask_BL, S), _grouped(x_BLM, S)
        # 0 * NaN is NaN, so NaN in padding would reach the losses' sums and the masks' products.
        x_GSM = jnp.where(mask_GS[..., None], x_GSM, 0)
        x_GSM = constrain(x_GSM, ("batch", "length", "embed"))
        direction_GS = None if direction_BL is None else _grouped(direction_BL, S)
        tokens = Tokens(
            score=functools.partial(self._score, x_GSM, direction_GS),
            mask_GS=mask_GS,
            ids_GS=None if ids_BL is None else _grouped(ids_BL, S),
            step=step,
            # T5X passes one stream of random numbers, named "dropout".
            rng=self.make_rng("dropout") if train and self.has_rng("dropout") else None,
            table=self._table,
            # What `move_biases` changes.
            bias=lambda: Table(self.num_experts, np.zeros, jnp.float32, name=BIAS)(),
            # `init` may be called without random numbers for dropout.
            train=train and not self.is_initializing(),
            causal=self.causal,
        )

        def capacity(choices: int) -> int:
            if factor is None:
                return S
            return plans.expert_capacity(S, self.num_experts, factor, choices, self.capacity_rule)

        routing = self.gate(tokens, self.num_experts, capacity)
        if not isinstance(routing, Routing):
            allowed = "a function that returns m4.model.routing.Routing, such as plan_choices does"
            raise SettingError("MoeLayer.gate", self.gate, f"{allowed}; it returned {routing!r}")
        dispatch = self.dropless_dispatch if factor is None else self.dispatch
        y_GSM = self._carry(x_GSM.astype(self.dtype), routing, dispatch, deterministic)
        self._sow(routing, direction_GS)
        y_BLM = y_GSM.reshape(x_BLM.shape)
        if self.shared_width:
            shared = FeedForward(self.shared_width, **_options(self), name="shared")
            y_BLM += shared(x_GSM.reshape(x_BLM.shape), deterministic=deterministic)
        return y_BLM

    def _carry(
        self, x_GSM: Array, routing: Routing, dispatch: Transport, deterministic: bool
    ) -> Array:
        """Returns y_GSM, the tokens after their experts."""
        make = ExpertParameters(
            self.num_experts, _given(self, "mlp_width"), **_options(self), name="experts"
        )
        experts = make(x_GSM.shape[-1], x_GSM.shape[0], deterministic=deterministic)
        # Parameters do not depend on the dispatch, and tokens of `init` need not divide over
        # devices.
        dispatch = gather if self.is_initializing() else dispatch
        if routing.shortcut is None:
            y_GSM = dispatch(x_GSM, routing, experts)
        else:
            use, shorter = routing.shortcut
            ways = [lambda x, plan=plan: dispatch(x, plan, experts) for plan in (shorter, routing)]
            y_GSM = jax.lax.cond(use, *ways, x_GSM)
        return constrain(y_GSM, ("batch", "length", "embed"))

    def _score(
        self,
        x_GSM: Array,
        direction_GS: Array | None,
        name: str,
        *,
        init: str = "normal",
        jitter: float = 0.0,
        key: Array | None = None,
        by_task: bool = False,
    ) -> Array:
        """Implements `Tokens.score` with the matrix `<name>/kernel`."""
        x_GSM = x_GSM.astype(jnp.float32)
        shape = (x_GSM.shape[-1], self.num_experts)
        kernel_ME = Kernel(shape, ("embed", "unmodeled"), ROUTER_INITS[init], name=name)()
        if jitter:
            assert key is not None, "jitter needs random numbers"
            around_1 = jax.random.uniform(key, x_GSM.shape, minval=1 - jitter, maxval=1 + jitter)
            x_GSM = x_GSM * around_1
        if by_task:
            embedding_TM, task_GS = self._tasks(x_GSM, direction_GS)
            logits_GSE = full_product("TM,ME->TE", embedding_TM, kernel_ME)[task_GS]
        else:
            logits_GSE = full_product("GSM,ME->GSE", x_GSM, kernel_ME)
        return constrain(logits_GSE, ("batch", None, None))

    def _tasks(self, x_GSM: Array, direction_GS: Array | None) -> tuple[Array, Array]:
        """Returns the embedding of each task [tasks, M], and the tasks of the tokens [G, S]."""
        count = max(self.tasks) + 1 if self.tasks else self.directions
        if direction_GS is None and self.is_initializing():
            direction_GS = jnp.zeros(x_GSM.shape[:2], jnp.int32)
        if not count or direction_GS is None:
            allowed = "one without tasks where the directions of the tokens are not known"
            raise SettingError("MoeLayer.gate", "by_direction", allowed)
        shape, axes = (count, x_GSM.shape[-1]), ("unmodeled", "embed")
        embedding_TM = Kernel(shape, axes, nn.initializers.normal(1.0), name=TASKS)()
        if not self.tasks:
            return embedding_TM, direction_GS
        return embedding_TM, jnp.asarray(self.tasks, jnp.int32)[direction_GS]

    def _table(self, name: str, make: Callable[[int], Any]) -> Array:
        """Returns a gate's table, which make(V) makes once and checkpoints keep."""
        assert self.vocab_size > 0, "a table needs the vocabulary's size"
        return Table(self.vocab_size, make, name=name)()

    def _sow(self, routing: Routing, direction_GS: Array | None) -> None:
        assigned_GSK = routing.position_GSK >= 0
        placed_GS = jnp.any(assigned_GSK, axis=-1)
        D, E, G = self.directions, self.num_experts, assigned_GSK.shape[0]
        values = {
            # T5X's MoeEncoderDecoderModel averages exactly these four and
            # `fraction_tokens_left_behind`, which every gate has, and fails without them.
            "auxiliary_loss": routing.aux_loss,
            "router_z_loss": routing.z_loss,
            "expert_usage": jnp.sum(assigned_GSK) / (E * routing.capacity * G),
            # Flaxformer's is the mean over choices, always 1/K.
            "router_confidence": plans.masked_mean(jnp.max(routing.weight_GSK, axis=-1), placed_GS),
            **routing.metrics,
        }
        for name, value in values.items():
            self.sow("intermediates", name, jnp.asarray(value, jnp.float32))
        if routing.bias_load_E is not None:
            self.sow("intermediates", BIAS_LOAD, routing.bias_load_E)
            self.sow("intermediates", BIAS_RATE, jnp.asarray(routing.bias_rate, jnp.float32))
        if D and direction_GS is not None:
            # On CPUs, this is faster than a product of one-hots, which writes [tokens, D * E].
            cell_GSK = direction_GS[..., None] * E + routing.expert_GSK
            cell_J = jnp.where(assigned_GSK, cell_GSK, D * E).reshape(-1)  # cell D*E: not counted
            count_J = jax.ops.segment_sum(jnp.ones_like(cell_J), cell_J, num_segments=D * E)
            self.sow("intermediates", "assigned_DE", count_J.reshape(D, E))


def _given(layer: MoeLayer, name: str) -> Any:
    if (value := getattr(layer, name)) is None:
        raise SettingError(f"MoeLayer.{name}", value, "given, for a layer outside a Transformer")
    return value


def _options(layer: MoeLayer) -> dict[str, Any]:
    # Not a method, because flax's `capture_intermediates` would take its result for an array.
    given = {name: _given(layer, name) for name in ("activations", "dropout_rate")}
    return {**given, "dtype": layer.dtype}


@dataclasses.dataclass(frozen=True)
class MoeFactory:
    """Makes layers like `layer`, with given arguments instead of its own.

    A model keeps this instead of a function, so that gin's bindings are read when the model is
    made, and equal models are equal keys of jit's cache.
    """

    layer: MoeLayer

    @classmethod
    def from_function(cls, make: Callable[..., MoeLayer], setting: str) -> "MoeFactory":
        """Returns a factory from a function that makes layers, or from a factory."""
        if isinstance(make, cls):
            return make
        wanted = "a function that makes a MoeLayer, such as MoeLayer itself"
        if isinstance(make, nn.Module) or not callable(make):
            raise SettingError(setting, make, wanted)
        if not isinstance(layer := make(parent=None), MoeLayer):
            raise SettingError(setting, make, wanted)
        return cls(layer)

    def __call__(self, **options: Any) -> MoeLayer:
        fields = {field.name for field in dataclasses.fields(self.layer) if field.init}
        kept = {name: getattr(self.layer, name) for name in fields - {"parent", "name"}}
        return type(self.layer)(**{**kept, **options})


def _grouped(x_BL: Array, group_tokens: int) -> Array:
    """Reshapes [B, L, ...] to [G, S, ...]."""
    return x_BL.reshape(-1, group_tokens, *x_BL.shape[2:])


def group_size(tokens: int, largest: int) -> int:
    """Returns the largest divisor of `tokens` up to `largest`, or `tokens` if that is 0."""
    if largest <= 0 or largest >= tokens:
        return tokens
    return next(size for size in range(largest, 0, -1) if tokens % size == 0)


# Name of the bias of a layer's gate, and of its load, sown to move it.
BIAS, BIAS_LOAD, BIAS_RATE = "bias", "bias_load_E", "bias_rate"
TASKS = "tasks"  # name of the embeddings of a layer's tasks
# Sown like metrics, but not averaged over layers.
COUNTS = ("assigned_DE", BIAS_LOAD, BIAS_RATE)


def mean_metrics(intermediates) -> dict[str, Array]:
    """Averages every metric over layers: {"auxiliary_loss": scalar, ..., "load_E": [E]}."""
    layers = [*layer_metrics(intermediates).values()]
    names = dict.fromkeys(name for metrics in layers for name in metrics)
    return {
        name: jnp.mean(jnp.stack([m[name] for m in layers if name in m]), axis=0) for name in names
    }


def layer_metrics(intermediates) -> dict[str, dict[str, Array]]:
    """Returns the metrics of each layer ("encoder_1", "decoder_1", ...)."""
    return {
        layer: {name: value for name, value in sown.items() if name not in COUNTS}
        for layer, sown in _sown(intermediates).items()
    }


def assigned_choices(intermediates) -> dict[str, Array]:
    """Returns layer -> `assigned_DE`, for layers that count choices."""
    name, layers = "assigned_DE", _sown(intermediates).items()
    return {layer: sown[name] for layer, sown in layers if name in sown}


def bias_loads(intermediates) -> dict[str, Array]:
    """Returns path of a bias -> loads that its layer sowed for `move_biases`."""
    sown = jax.tree_util.tree_leaves_with_path(intermediates)
    found = {"/".join(names_of(path)): value for path, value in sown}
    return {name: value for name, value in found.items() if name.endswith((BIAS_LOAD, BIAS_RATE))}


def move_biases(params, loads: Mapping[str, Array], parts: int):
    """Returns the parameters with b_e + rate * sign(mean load - load_e) in place of each bias b.

    Source: Wang et al. 2024 (arXiv 2408.15664), algorithm 1.

    Args:
        loads: Sums of `bias_loads` over the batch's parts, [E] or in a scanned stack [blocks, E].
        parts: Number of these parts, as the rates are also sums.
    """
    if not loads:
        return params

    def moved(path, leaf: Array) -> Array:
        *layer, name = names_of(path[:-1]) or [""]
        if name != BIAS:
            return leaf
        load, rate = (loads["/".join([*layer, sown])] for sown in (BIAS_LOAD, BIAS_RATE))
        # E times the difference is an integer, so that equal loads compare as equal.
        above = jnp.sum(load, axis=-1, keepdims=True) - load.shape[-1] * load
        return leaf + rate[..., None] / parts * jnp.sign(above)

    return jax.tree_util.tree_map_with_path(moved, params)


def _sown(intermediates) -> dict[str, dict[str, Array]]:
    """Returns layer -> name -> sown value, where a layer is its path without "moe"."""
    found: dict[str, dict[str, Array]] = defaultdict(dict)
    for path, value in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        *parts, name = names_of(path)
        layer = "/".join(part for part in parts if part != "moe")
        if scanned := re.fullmatch(r"(\w+)_blocks/layer_(\d+)", layer):
            # In a scanned stack, [blocks, ...]: a block ends with its MoE layer.
            for block in range(value.shape[0]):
                index = (block + 1) * (int(scanned[2]) + 1) - 1
                found[f"{scanned[1]}_{index}"][name] = value[block]
        else:
            found[layer][name] = value
    return found

"""The mixture-of-experts layer: groups, gate, dispatch, experts (GShard, section 2.2)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from m4.model.dispatch import Transport
from m4.model.dispatch.dropless import dropless
from m4.model.dispatch.gather import gather
from m4.model.feed_forward import Activation, ExpertParameters, FeedForward, check_activations
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.layers import Array, DType, Kernel, Table, constrain, names_of
from m4.model.product import full_product
from m4.model.routing import CAPACITY_RULES, CapacityFactor, Gate, Routing, Tokens, expert_capacity
from m4.settings import MUTABLE, Between, Count, Given, OneOf, Rate, SettingError, Size, checked

# Initial router matrices by name; docs/gates.md says which gate uses which.
ROUTER_INITS = {
    "normal": nn.initializers.normal(0.02),  # flaxformer
    "zeros": nn.initializers.zeros,  # Shazeer et al. 2017: balanced at first, noise decides
    "orthogonal": nn.initializers.orthogonal(0.1),  # BASE's centroids (fairseq)
}


@checked
class MoeLayer(nn.Module):
    """A mixture of experts in place of a feed-forward layer: x_BLM -> y_BLM.

    Tokens without a slot get 0 (the residual connection carries them), or what `shared_width` adds.
    The layer sows metrics into `intermediates` (docs/model.md): T5X's five, as float32, and the
    others of `routing.make_routing`; with `directions`, where the tokens' are given, `assigned_DE`,
    int32, the choices with a slot; with a gate that has a bias what `move_biases` needs.

    Attributes:
        num_experts: E.
        mlp_width: F of each expert. Defaults to the model's own in a `Transformer`; elsewhere it
            must be given, and so must `activations` and `dropout_rate`.
        group_tokens: Largest S; the largest divisor of B*L up to it is used. 0 is one group.
            Outside training, where the capacity factor is None, a row is a group.
        train_capacity_factor: Number of slots of an expert, in units of K*S/E
            (`routing.expert_capacity`). None never drops a token.
        eval_capacity_factor: The factor outside training, for whole sentences. With None a
            sentence's translation does not depend on its batch. Defaults to None.
        decode_capacity_factor: The factor in decoding, one position at a time. Defaults to None.
        capacity_rule: Rounding of a fraction of a slot (`routing.CAPACITY_RULES`).
        gate: The router (`m4.model.gates`).
        dispatch: Transport of tokens to their experts and back (`m4.model.dispatch`), where the
            capacity factor is a number.
        dropless_dispatch: Transport where the capacity factor is None, so that nothing is dropped.
        shared_width: F of a feed-forward layer that all tokens pass beside their experts, and whose
            output is added to theirs (the shared experts of DeepSeekMoE, arXiv 2401.06066, which
            together are one layer); 0 for none.
        activations: See `m4.model.feed_forward.activate`; ("silu", "linear") is Mixtral's SwiGLU.
        dropout_rate: Dropout within the experts.
        output_masking: p. In training each choice's expert output is 0 with probability p, else
            divided by 1 - p: the expert output masking of NLLB (arXiv 2207.04672).
        causal: The layer is in a decoder; gates that look at later tokens refuse.
        vocab_size: V, for gates that route by token id.
        directions: Number of translation directions whose tokens are counted by expert; 0 for
            none. It changes neither parameters nor results, except those of a gate by task.
        tasks: Task of each direction, for gates by task. Defaults to a task for each direction.
        dtype: Type of the experts' products.
    """

    num_experts: Annotated[int, Between(1, 2**16)]
    mlp_width: Size | None = None
    group_tokens: Count = 1024
    train_capacity_factor: CapacityFactor | None = 1.25
    eval_capacity_factor: CapacityFactor | None = None
    decode_capacity_factor: CapacityFactor | None = None
    capacity_rule: Annotated[str, OneOf(tuple(CAPACITY_RULES))] = "lingvo"
    gate: Gate = top2_gshard
    dispatch: Annotated[Transport, MUTABLE] = gather
    dropless_dispatch: Annotated[Transport, MUTABLE] = dropless
    shared_width: Count = 0
    activations: Sequence[Activation] | None = None
    dropout_rate: Rate | None = None
    output_masking: Rate = 0.0
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
            step: Training steps done, for gates that anneal.
            deterministic: False in training: dropout, noise, and `train_capacity_factor`.
            decode: One step of a search, with `decode_capacity_factor`.

        Raises:
            TypeError: The mask is not bool.
            ValueError: `x_BLM` and the mask do not fit.
            SettingError: A setting does not fit the tokens, or the gate refuses its place.
        """
        if x_BLM.ndim != 3 or mask_BL.shape != x_BLM.shape[:2]:
            raise ValueError(
                f"x_BLM {[*x_BLM.shape]}, mask_BL {[*mask_BL.shape]}: must be [batch, length, "
                "width] and [batch, length]"
            )
        B, L, _ = x_BLM.shape
        if mask_BL.dtype != bool:
            raise TypeError(f"mask_BL: must be bool, True for real tokens; it is {mask_BL.dtype}")
        train = not deterministic
        factor = self.train_capacity_factor if train else self.eval_capacity_factor
        if decode:
            factor = self.decode_capacity_factor
        S = self._group_tokens(B, L, whole_rows=factor is None and not train)
        mask_GS, x_GSM = _grouped(mask_BL, S), _grouped(x_BLM, S)
        # 0 * NaN is NaN: NaN in padding would reach the losses' sums and the masks' products.
        x_GSM = jnp.where(mask_GS[..., None], x_GSM, 0)
        x_GSM = constrain(x_GSM, ("batch", "length", "embed"))
        direction_GS = None if direction_BL is None else _grouped(direction_BL, S)
        tokens = Tokens(
            score=functools.partial(self._score, x_GSM, direction_GS),
            mask_GS=mask_GS,
            ids_GS=None if ids_BL is None else _grouped(ids_BL, S),
            direction_GS=direction_GS,
            step=step,
            # T5X passes one stream of random numbers, named "dropout".
            rng=self.make_rng("dropout") if train and self.has_rng("dropout") else None,
            table=self._table,
            # What `move_biases` changes.
            bias=lambda: Table(self.num_experts, np.zeros, jnp.float32, name=BIAS)(),
            # `init` may come without random numbers for dropout.
            train=train and not self.is_initializing(),
            causal=self.causal,
        )

        def capacity(choices: int) -> int:
            if factor is None:
                return S
            return expert_capacity(S, self.num_experts, factor, choices, self.capacity_rule)

        routing = self.gate(tokens, self.num_experts, capacity)
        if not isinstance(routing, Routing):
            allowed = "a function that returns m4.model.routing.Routing, such as plan_choices does"
            raise SettingError("MoeLayer.gate", self.gate, f"{allowed}; it returned {routing!r}")
        dispatch = self.dropless_dispatch if factor is None else self.dispatch
        carried = self._mask_outputs(routing) if tokens.rng is not None else routing
        y_GSM = self._carry(x_GSM.astype(self.dtype), carried, dispatch, deterministic)
        self._sow(routing, tokens)
        if self.directions and tokens.direction_GS is not None:
            self._sow_choices(routing, tokens.direction_GS)
        y_BLM = y_GSM.reshape(x_BLM.shape)
        if self.shared_width:
            shared = FeedForward(self.shared_width, **_options(self), name="shared")
            y_BLM += shared(x_GSM.reshape(x_BLM.shape), deterministic=deterministic)
        return y_BLM

    def _group_tokens(self, B: int, L: int, *, whole_rows: bool) -> int:
        if whole_rows:
            # Where nothing is dropped, groups change nothing for a causal gate; with a group for
            # each row the choices of any other gate do not depend on other rows.
            return L
        S = group_size(B * L, self.group_tokens)
        if min(self.group_tokens, B * L) > 4 * S:
            # In groups of a token or two every token would have a slot at every expert.
            allowed = f"a number of which a divisor of the {B * L} tokens is at least a quarter"
            raise SettingError("MoeLayer.group_tokens", self.group_tokens, allowed)
        return S

    def _mask_outputs(self, routing: Routing) -> Routing:
        """Sets the weights of masked outputs to 0 (slots stay taken), and raises the others."""
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
        """Returns y_GSM, the tokens after their experts."""
        make = ExpertParameters(
            self.num_experts, _given(self, "mlp_width"), **_options(self), name="experts"
        )
        experts = make(x_GSM.shape[-1], x_GSM.shape[0], deterministic=deterministic)
        # Parameters do not depend on the dispatch, and the few tokens that `init` is given need not
        # divide over the devices.
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
        direction_GS: Array | None,
        name: str,
        *,
        init: str = "normal",
        jitter: float = 0.0,
        key: Array | None = None,
        by_task: bool = False,
    ) -> Array:
        """Implements `Tokens.score`, by the matrix `<name>/kernel`.

        Args:
            init: Its initial values, a name in `ROUTER_INITS`.
            jitter: The float32 copy of the tokens is multiplied by U(1 - jitter, 1 + jitter) first.
            by_task: Takes the learned embedding of each token's task in place of the token.
        """
        x_GSM = x_GSM.astype(jnp.float32)
        shape = (x_GSM.shape[-1], self.num_experts)
        kernel_ME = Kernel(shape, ("embed", "unmodeled"), ROUTER_INITS[init], name=name)()
        if jitter:
            assert key is not None, "jitter needs random numbers"
            x_GSM = x_GSM * jax.random.uniform(
                key, x_GSM.shape, minval=1 - jitter, maxval=1 + jitter
            )
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
        """Returns a gate's table, made once by make(V) and later read from the checkpoint."""
        assert self.vocab_size > 0, "a table needs the vocabulary's size"
        return Table(self.vocab_size, make, name=name)()

    def _sow(self, routing: Routing, tokens: Tokens) -> None:
        assigned = jnp.sum(routing.position_GSK >= 0)
        slots = routing.num_experts * routing.capacity * routing.position_GSK.shape[0]
        values = {
            # T5X's MoeEncoderDecoderModel averages exactly these four and
            # `fraction_tokens_left_behind`, which every gate has, and fails without them.
            "auxiliary_loss": routing.aux_loss,
            "router_z_loss": routing.z_loss,
            "expert_usage": assigned / slots,
            "router_confidence": routing.confidence(),
            **routing.metrics,
        }
        for name, value in values.items():
            self.sow("intermediates", name, jnp.asarray(value, jnp.float32))
        if routing.bias_load_E is not None:
            self.sow("intermediates", BIAS_LOAD, routing.bias_load_E)
            self.sow("intermediates", BIAS_RATE, jnp.asarray(routing.bias_rate, jnp.float32))

    def _sow_choices(self, routing: Routing, direction_GS: Array) -> None:
        assigned_GSK = routing.position_GSK >= 0
        # Faster on CPUs than a product of one-hots, which writes [tokens, D * E].
        D, E = self.directions, self.num_experts
        cell_GSK = direction_GS[..., None] * E + routing.expert_GSK
        cell_J = jnp.where(assigned_GSK, cell_GSK, D * E).reshape(-1)  # cell D*E is not counted
        count_J = jax.ops.segment_sum(jnp.ones_like(cell_J), cell_J, num_segments=D * E)
        self.sow("intermediates", "assigned_DE", count_J.reshape(D, E))


def _given(layer: MoeLayer, name: str) -> Any:
    if (value := getattr(layer, name)) is None:
        raise SettingError(f"MoeLayer.{name}", value, "given, for a layer outside a Transformer")
    return value


def _options(layer: MoeLayer) -> dict[str, Any]:
    # No method, because flax's `capture_intermediates` would take its result for an array.
    given = {name: _given(layer, name) for name in ("activations", "dropout_rate")}
    return {**given, "dtype": layer.dtype}


@dataclasses.dataclass(frozen=True)
class MoeFactory:
    """Makes layers like `layer`, with the arguments that are given in place of its own.

    A model keeps this instead of a function: so gin's bindings are read when the model is made, and
    equal models are equal keys of jit's cache.
    """

    layer: MoeLayer

    @classmethod
    def from_function(cls, make: Callable[..., MoeLayer], setting: str) -> "MoeFactory":
        """Returns a factory from a function, the value of `setting`, that makes layers, or one."""
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
    """Reshapes [B, L, ...] to [G, S, ...]."""
    return x_BL.reshape(-1, group_tokens, *x_BL.shape[2:])


def group_size(tokens: int, largest: int) -> int:
    """Returns the largest divisor of `tokens` up to `largest`; all tokens where that is 0."""
    if largest <= 0 or largest >= tokens:
        return tokens
    return next(size for size in range(largest, 0, -1) if tokens % size == 0)


# The bias of a layer's gate, and what is sown to move it.
BIAS, BIAS_LOAD, BIAS_RATE = "bias", "bias_load_E", "bias_rate"
TASKS = "tasks"  # the embeddings of a layer's tasks
# Sown with the metrics, but without a mean over layers.
COUNTS = ("assigned_DE", BIAS_LOAD, BIAS_RATE)


def mean_metrics(intermediates) -> dict[str, Array]:
    """Averages every metric over layers: {"auxiliary_loss": scalar, ..., "load_E": [E]}."""
    found: dict[str, list[Array]] = {}
    for metrics in layer_metrics(intermediates).values():
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: jnp.mean(jnp.stack(values), axis=0) for name, values in found.items()}


def layer_metrics(intermediates) -> dict[str, dict[str, Array]]:
    """Returns the metrics of each layer ("encoder_1", "decoder_1", ...)."""
    found: dict[str, dict[str, Array]] = {}
    for layer, name, value in _sown(intermediates):
        if name not in COUNTS:
            found.setdefault(layer, {})[name] = value
    return found


def assigned_choices(intermediates) -> dict[str, Array]:
    """Returns `assigned_DE` of each layer that counts its choices."""
    return {layer: value for layer, name, value in _sown(intermediates) if name == "assigned_DE"}


def bias_loads(intermediates) -> dict[str, Array]:
    """Returns what the layers with a bias sowed for `move_biases`, by the paths of parameters."""
    sown = jax.tree_util.tree_leaves_with_path(intermediates)
    found = {"/".join(names_of(path)): value for path, value in sown}
    return {name: value for name, value in found.items() if name.endswith((BIAS_LOAD, BIAS_RATE))}


def move_biases(params, loads: Mapping[str, Array], parts: int):
    """Returns the parameters with b_e + rate * sign(mean load - load_e) in place of each bias b.

    Source: Wang et al. 2024 (arXiv 2408.15664), algorithm 1.

    Args:
        loads: Sums of `bias_loads` over the batch's parts, [E] or in a scanned stack [blocks, E].
        parts: Number of these parts: the rates are sums too.
    """
    if not loads:
        return params

    def moved(path, leaf: Array) -> Array:
        *layer, name = names_of(path[:-1]) or [""]
        if name != BIAS:
            return leaf
        load, rate = (loads["/".join([*layer, sown])] for sown in (BIAS_LOAD, BIAS_RATE))
        # E times the difference: whole numbers, so that equal loads are found equal.
        above = jnp.sum(load, axis=-1, keepdims=True) - load.shape[-1] * load
        return leaf + rate[..., None] / parts * jnp.sign(above)

    return jax.tree_util.tree_map_with_path(moved, params)


def _sown(intermediates) -> list[tuple[str, str, Array]]:
    """Returns (layer, name, value) of everything sown; a layer's name is its path without "moe".

    Values of a scanned stack, [blocks, ...], are taken apart: a block ends with its MoE layer.
    """
    found = []
    for path, value in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        *layer, name = names_of(path)
        layer = [part for part in layer if part != "moe"]
        if len(layer) == 2 and layer[0].endswith("_blocks"):
            stack, size = layer[0].removesuffix("_blocks"), int(layer[1].removeprefix("layer_")) + 1
            for block in range(value.shape[0]):
                found.append((f"{stack}_{(block + 1) * size - 1}", name, value[block]))
        else:
            found.append(("/".join(layer), name, value))
    return found

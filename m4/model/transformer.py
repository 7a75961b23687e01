"""T5's encoder-decoder with mixtures of experts instead of every other feed-forward layer.

The model is T5's (pre-norm, relative positions, no biases), with experts in the layers where GShard
has them (arXiv 2006.16668, section 2.1). Methods, parameter names and logical axes follow T5X's
contract for a module, so that stock T5X can train, decode and score it (docs/model.md).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from m4.model import pipeline
from m4.model.attention import Attention, RelativeBias
from m4.model.feed_forward import Activation, FeedForward, check_activations
from m4.model.layers import (
    Array,
    Dense,
    DType,
    Embed,
    RmsNorm,
    SinusoidalPositions,
    constrain,
    dropout,
    shapes_only,
)
from m4.model.moe import TASKS, MoeFactory, MoeLayer
from m4.model.product import FULL
from m4.model.stack import REMAT, DecoderLayer, EncoderLayer, Inputs, Mode, remat, scanned
from m4.settings import MUTABLE, Between, Count, Given, OneOf, Rate, SettingError, Size, checked

Layers = Annotated[int, Between(1, 1024)]


@checked
class Transformer(nn.Module):
    """The whole model, from token ids to logits.

    Attributes:
        vocab_size: Size V of the shared vocabulary, or of the targets' own.
        width, heads, head_width, mlp_width: Sizes M, N, D and F (`m4.parallel.axes`).
        encoder_layers, decoder_layers: Number of layers of the encoder and of the decoder.
        moe: Makes the mixtures of experts: `MoeLayer`, or a function like it. Defaults to none.
        decoder_moe: Makes those of the decoder, with as many experts. Defaults to `moe`.
        moe_every: Every n-th feed-forward layer is a MoE (2: the second, the fourth, ...).
        activations: ("relu",), or ("gelu", "linear") for gated GELU.
        dropout_rate: Dropout after embeddings and layers, in attention and in feed-forward layers.
        absolute_positions: Whether to add sinusoidal positions to the embeddings, besides the
            relative bias. T5 does not; short runs on little data need them (docs/decisions.md).
        relative_bias: "shared" for one table of relative biases per stack, or "every_layer" for one
            per layer, as in umT5.
        relative_buckets, relative_distance: Number of relative positions, and their largest offset.
        tied_logits: Whether the output projection is the embedding, not a separate matrix.
        directions, tasks: See `MoeLayer`.
        source_vocab_size: Size of the sources' own vocabulary. Defaults to a shared one.
        scan_layers: Whether each stack is one scan over blocks of `moe_every` layers
            (m4.model.stack), which compiles in the time of one block.
        pipeline_microbatches: Number of parts of a device's rows that pass through the mesh's
            stages as a pipeline (m4.model.pipeline).
        remat: Policy of recomputation in the backward pass, a name of `m4.model.stack.REMAT`.
        dtype: Type of the activations; parameters, routing, softmax and logits are float32.
    """

    vocab_size: Annotated[Size, Given("the vocabulary")]
    width: Size = 512
    heads: Size = 8
    head_width: Size = 64
    mlp_width: Size = 2048
    encoder_layers: Layers = 6
    decoder_layers: Layers = 6
    moe: Callable[..., MoeLayer] | None = None
    decoder_moe: Callable[..., MoeLayer] | None = None
    moe_every: Layers = 2
    activations: Sequence[Activation] = ("relu",)
    dropout_rate: Rate = 0.1
    absolute_positions: bool = False
    relative_bias: Annotated[str, OneOf(("shared", "every_layer"))] = "shared"
    relative_buckets: Annotated[int, Between(4, 2**16)] = 32
    relative_distance: Size = 128
    tied_logits: bool = True
    directions: Annotated[Count, Given("corpus.CorpusSpec.mixture")] = 0
    tasks: Sequence[Count] = ()
    source_vocab_size: Annotated[Size | None, Given("the vocabulary")] = None
    scan_layers: bool = False
    pipeline_microbatches: Annotated[int, Between(0, 2**20)] = 0
    remat: Annotated[str, OneOf(tuple(REMAT)), MUTABLE] = "none"
    dtype: DType = jnp.float32

    def __post_init__(self) -> None:
        # gin gives lists, and a module must be hashable to be a static argument of jit.
        self.activations, self.tasks = tuple(self.activations), tuple(self.tasks)
        check_activations("Transformer.activations", self.activations)
        for name in ("moe", "decoder_moe"):
            if (given := getattr(self, name)) is not None:
                setattr(self, name, MoeFactory.from_function(given, f"Transformer.{name}"))
        super().__post_init__()
        if self.absolute_positions and self.width % 2:
            allowed = "even, with Transformer.absolute_positions"
            raise SettingError("Transformer.width", self.width, allowed)
        if self.relative_distance <= self.relative_buckets // 2:
            allowed = f"more than half of Transformer.relative_buckets = {self.relative_buckets}"
            raise SettingError("Transformer.relative_distance", self.relative_distance, allowed)
        if self.moe is None:
            return
        every, layers = self.moe_every, max(self.encoder_layers, self.decoder_layers)
        if every > layers:
            allowed = f"at most {layers}, or no layer has experts (Transformer.moe = None: dense)"
            raise SettingError("Transformer.moe_every", every, allowed)
        for stack in ("encoder_layers", "decoder_layers"):
            if self.scan_layers and (layers := getattr(self, stack)) % every:
                allowed = f"a multiple of Transformer.moe_every = {every} in a scan (scan_layers)"
                raise SettingError(f"Transformer.{stack}", layers, allowed)
        ours, its = (
            one and one.num_experts for one in (self.encoder_experts, self.decoder_experts)
        )
        if ours != its:
            allowed = f"a layer of {ours} experts, as many as the encoder's"
            raise SettingError("Transformer.decoder_moe", f"{its} experts", allowed)

    @property
    def encoder_experts(self) -> MoeLayer | None:
        """The encoder's mixture of experts, unbound; None in a dense model."""
        return moe_layer(self, causal=False, parent=None)

    @property
    def decoder_experts(self) -> MoeLayer | None:
        """The decoder's mixture of experts, like `encoder_experts`."""
        return moe_layer(self, causal=True, parent=None)

    @property
    def by_task(self) -> bool:
        """True if a gate needs the tokens' directions."""
        leaves = jax.tree_util.tree_leaves_with_path(abstract_variables(self)["params"])
        return any(path[-2].key == TASKS for path, _ in leaves)

    def setup(self) -> None:
        self.token_embedder = Embed(self.vocab_size, self.width, dtype=self.dtype)
        if self.source_vocab_size is not None:
            self.source_token_embedder = Embed(self.source_vocab_size, self.width, dtype=self.dtype)
        relative = (self.relative_buckets, self.relative_distance, self.relative_bias == "shared")
        self.encoder_bias = RelativeBias(self.heads, True, *relative)
        self.decoder_bias = RelativeBias(self.heads, False, *relative)
        self.encoder = self._stack(EncoderLayer, self.encoder_layers, "encoder")
        self.decoder = self._stack(DecoderLayer, self.decoder_layers, "decoder")
        self.encoder_norm = RmsNorm(dtype=self.dtype)
        self.decoder_norm = RmsNorm(dtype=self.dtype)
        self.drop = dropout(self.dropout_rate)
        if self.absolute_positions:
            self.encoder_positions = SinusoidalPositions(self.width)
            self.decoder_positions = SinusoidalPositions(self.width)
        if not self.tied_logits:
            # In float32, because rounded logits over a whole vocabulary harm translations.
            self.logits_dense = Dense(self.vocab_size, axes=("embed", "vocab"), precision=FULL)

    def _stack(self, kind, layers: int, name: str) -> list[nn.Module]:
        if self.scan_layers:
            make = functools.partial(make_layer, self, kind)
            block = 1 if self.moe is None else self.moe_every
            return [scanned(make, layers, block, self.remat, f"{name}_blocks")]
        kind = remat(kind, self.remat, scanned=False)
        return [make_layer(self, kind, index, f"{name}_{index}") for index in range(layers)]

    def _run(self, stack: list[nn.Module], x_BLM: Array, inputs: Inputs, mode: Mode) -> Array:
        if self._pipelined(mode.decode):
            pipeline.check(jax.sharding.get_abstract_mesh(), self, x_BLM.shape[0])
            (layers,), key = stack, None if mode.deterministic else self.make_rng("dropout")
            how = self.pipeline_microbatches, self.remat, key
            return pipeline.pipelined(layers, x_BLM, inputs, mode, *how)
        for layer in stack:
            x_BLM = layer(x_BLM, inputs, mode)
            if self.scan_layers:
                x_BLM, _ = x_BLM
        return x_BLM

    def _pipelined(self, decode: bool = False) -> bool:
        asked = self.scan_layers and self.pipeline_microbatches and not decode
        if not asked or self.is_initializing():
            return False
        return pipeline.stages(jax.sharding.get_abstract_mesh()) > 1

    def _constrain(self, x: Array, axes: Sequence[str], decode: bool = False) -> Array:
        return (pipeline.spread if self._pipelined(decode) else constrain)(x, tuple(axes))

    def encode(
        self,
        encoder_input_tokens: Array,
        encoder_segment_ids: Array | None = None,
        enable_dropout: bool = True,
        encoder_positions: Array | None = None,
        encoder_direction_ids: Array | None = None,
        step: Array | None = None,
    ) -> Array:
        """Encodes the sources, token ids [B, L] with 0 as padding -> [B, L, M].

        Args:
            encoder_segment_ids: Number of the pair of each token in a packed row.
            enable_dropout: True in training; decides also the experts' gates and capacity.
            encoder_positions: Positions in packed sources; the relative bias does not need them.
            encoder_direction_ids, step: Inputs of gates and counts; T5X passes none.
        """
        tokens_BL = encoder_input_tokens.astype(jnp.int32)
        real_BL = tokens_BL > 0
        mask_BLL = real_BL[:, None, :] & real_BL[:, :, None]
        mask_BLL &= same_segment(encoder_segment_ids, encoder_segment_ids)
        deterministic = not enable_dropout
        own = self.source_vocab_size is not None
        x_BLM = (self.source_token_embedder if own else self.token_embedder)(tokens_BL)
        if self.absolute_positions:
            position_BLM = self.encoder_positions(tokens_BL.shape[1], encoder_positions)
            x_BLM += position_BLM.astype(self.dtype)
        x_BLM = self._constrain(x_BLM, ("batch", "length", "embed"))
        x_BLM = self.drop(x_BLM, deterministic=deterministic)
        bias = self.encoder_bias(tokens_BL.shape[1])
        about = {"mask_BL": real_BL, "ids_BL": tokens_BL, "step": step}
        about["direction_BL"] = encoder_direction_ids
        inputs = {"bias": bias, "mask": mask_BLL, "about": about}
        x_BLM = self._run(self.encoder, x_BLM, inputs, Mode(deterministic))
        return self.drop(self.encoder_norm(x_BLM), deterministic=deterministic)

    def decode(
        self,
        encoded: Array,
        encoder_input_tokens: Array,
        decoder_input_tokens: Array,
        decoder_target_tokens: Array,
        encoder_segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        decoder_positions: Array | None = None,
        enable_dropout: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
        decoder_direction_ids: Array | None = None,
        step: Array | None = None,
    ) -> Array:
        """Returns logits of the next tokens, float32 [B, T, V].

        With `decode=True`, T is 1 (or the whole length in the call that allocates the cache), and
        the past is in the collection `cache`.

        Args:
            encoded: Output of `encode`, [B, L, M].
            encoder_input_tokens: Source token ids [B, L], for the padding.
            decoder_input_tokens: Target token ids [B, T], shifted right by one.
            decoder_target_tokens: Target token ids [B, T]; 0 is padding. Not read in decoding.
            max_decode_length: Number of positions of the cache, needed once it is allocated.
        """
        source_BL = encoder_input_tokens.astype(jnp.int32)
        input_BT = decoder_input_tokens.astype(jnp.int32)
        # The input's first token is 0 (T5's start), so the target tells what is padding. In
        # decoding there is no target, and every token is real.
        real_BT = jnp.ones_like(input_BT, bool) if decode else decoder_target_tokens > 0
        cross_mask_BTL = real_BT[:, :, None] & (source_BL > 0)[:, None, :]
        cross_mask_BTL &= same_segment(decoder_segment_ids, encoder_segment_ids)
        length = input_BT.shape[1]
        bias = self.decoder_bias(length, decode=decode, max_decode_length=max_decode_length)
        causal_TT = jnp.tril(jnp.ones((length, length), bool))
        mask_BTT = causal_TT[None] & same_segment(decoder_segment_ids, decoder_segment_ids)
        if decode:
            mask_BTT = None  # the cache masks the positions after this one
        deterministic = not enable_dropout
        x_BTM = self.token_embedder(input_BT)
        if self.absolute_positions:
            position_BTM = self.decoder_positions(length, decoder_positions, decode=decode)
            x_BTM += position_BTM.astype(self.dtype)
        x_BTM = self._constrain(x_BTM, ("batch", "length", "embed"), decode)
        x_BTM = self.drop(x_BTM, deterministic=deterministic)
        about = {"mask_BL": real_BT, "ids_BL": input_BT, "step": step}
        about["direction_BL"] = decoder_direction_ids
        inputs = {"bias": bias, "mask": mask_BTT, "about": about}
        inputs |= {"cross_mask": cross_mask_BTL, "encoded": encoded}
        x_BTM = self._run(self.decoder, x_BTM, inputs, Mode(deterministic, decode))
        x_BTM = self.drop(self.decoder_norm(x_BTM), deterministic=deterministic)
        if self.tied_logits:
            logits_BTV = self.token_embedder.attend(x_BTM)
        else:
            logits_BTV = self.logits_dense(x_BTM.astype(jnp.float32))
        return self._constrain(logits_BTV, ("batch", "length", "vocab"), decode)

    def __call__(
        self,
        encoder_input_tokens: Array,
        decoder_input_tokens: Array,
        decoder_target_tokens: Array,
        encoder_segment_ids: Array | None = None,
        decoder_segment_ids: Array | None = None,
        encoder_positions: Array | None = None,
        decoder_positions: Array | None = None,
        *,
        enable_dropout: bool = True,
        decode: bool = False,
        encoder_direction_ids: Array | None = None,
        decoder_direction_ids: Array | None = None,
        step: Array | None = None,
    ) -> Array:
        """Returns float32 logits [B, T, V]; see `encode` and `decode`."""
        encoded_BLM = self.encode(
            encoder_input_tokens, encoder_segment_ids, enable_dropout,
            encoder_positions, encoder_direction_ids, step,
        )  # fmt: skip
        return self.decode(
            encoded_BLM, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
            encoder_segment_ids, decoder_segment_ids, decoder_positions, enable_dropout, decode,
            decoder_direction_ids=decoder_direction_ids, step=step,
        )  # fmt: skip


def make_layer(model: Transformer, kind, index: int, name: str | None) -> nn.Module:
    """Makes layer `index` of a stack; a method would make it a child of the model."""
    options = {"dropout_rate": model.dropout_rate, "dtype": model.dtype}

    def attention(name: str) -> Attention:
        sizes = model.heads, model.head_width, model.relative_buckets
        return Attention(*sizes, **options, name=name)

    def feed_forward() -> nn.Module:
        if model.moe is not None and (index + 1) % model.moe_every == 0:
            return cast(nn.Module, moe_layer(model, causal=kind.cross, name="moe"))
        return FeedForward(model.mlp_width, model.activations, **options, name="mlp")

    return kind(attention, feed_forward, **options, name=name)


def moe_layer(model: Transformer, *, causal: bool, **place: Any) -> MoeLayer | None:
    """Makes a MoE layer of the encoder, or of the decoder if `causal`; None in a dense model.

    Sizes default to the model's. `place` is its name, or `parent=None` for an unbound layer.
    """
    if model.moe is None:
        return None
    make = (model.decoder_moe if causal else None) or model.moe
    layer = make(parent=None)
    defaults = {
        name: getattr(model, name)
        for name in ("mlp_width", "activations", "dropout_rate")
        if getattr(layer, name) is None
    }
    given = {name: getattr(model, name) for name in ("directions", "tasks", "dtype", "vocab_size")}
    if not causal and model.source_vocab_size is not None:
        given["vocab_size"] = model.source_vocab_size
    return make(**defaults, **given, causal=causal, **place)


def same_segment(query_BQ: Array | None, key_BR: Array | None) -> Array:
    """Returns a mask [B, Q, R], True where query and key belong to the same packed pair."""
    if query_BQ is None or key_BR is None:
        return jnp.ones((1, 1, 1), bool)
    return query_BQ[:, :, None] == key_BR[:, None, :]


@cast(Any, functools.lru_cache(maxsize=8))  # type checkers do not see that a module is hashable
def abstract_variables(model: Transformer) -> Mapping[str, Any]:
    """Returns shapes of `params` and logical axes `params_axes`; cached, not to be changed."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    # The key is made inside the trace; outside, it would be an array on a real device.
    with shapes_only():
        return jax.eval_shape(
            lambda x: model.init(jax.random.key(0), x, x, x, enable_dropout=False), tokens
        )

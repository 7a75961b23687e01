"""Beam search with a model: one compiled program for a batch, on one device or over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m4.data.preprocess import EOS_ID
from m4.eval.decoding.beam import DecodingState, beam_search
from m4.model.blocks import unstack
from m4.model.layers import constrain
from m4.model.moe import sown_choices
from m4.parallel import distributed
from m4.parallel.layout import Layout


def _search(
    model: nn.Module,
    params: Any,
    tokens_BL: jax.Array,
    target_length: int,
    beams: int,
    alpha: float,
    routes: bool = False,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The best sequence of each source: int32 [B, T], its score [B], and who went where.

    tokens_BL: int32, 0 is padding. T is `target_length`.

    The last, with `routes`: MoE layer -> the expert of each choice, int32 [B, L or T, K], -1 where
    there is none, for the tokens of the source and of the best sequence (model.directions > 0).

    `model` (static, by equality) follows T5X's contract; `params` are an argument, so that models
    of equal shape share the compiled program. Within `Layout.axis_rules` it is for that mesh.
    """
    if getattr(model, "scan_layers", False):
        # One layer after the other: beams are gathered along the first axis of what is cached.
        model, params = model.clone(scan_layers=False), unstack(params)
    variables = {"params": params}
    batch = tokens_BL.shape[0]
    sowing = ["intermediates"] if routes else []
    sown: Any
    encoded_BLM, sown = model.apply(
        variables, tokens_BL, enable_dropout=False, mutable=sowing, method="encode"
    )
    chosen = sown_choices(sown.get("intermediates", {}), "chosen_BLK")
    # The contract's call that allocates the cache. Its leaves start at zero, so shapes are enough.
    full_BT = jax.ShapeDtypeStruct((batch, target_length), jnp.int32)
    _, allocated = jax.eval_shape(
        functools.partial(model.apply, enable_dropout=False, decode=True, mutable=["cache"]),
        variables,
        encoder_input_tokens=tokens_BL,
        decoder_input_tokens=full_BT,
        decoder_target_tokens=full_BT,
    )
    cache = _by_rows(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), allocated["cache"]))

    def step(
        encoded: jax.Array, tokens: jax.Array, last: jax.Array, cache: Mapping[str, Any]
    ) -> tuple[jax.Array, Mapping[str, Any], dict[str, jax.Array]]:
        changed: Any
        logits, changed = model.apply(
            {**variables, "cache": cache},
            encoded,
            tokens,
            last,
            last,
            enable_dropout=False,
            decode=True,
            max_decode_length=target_length,
            mutable=["cache", *sowing],
            method="decode",
        )
        chosen = sown_choices(changed.get("intermediates", {}), "chosen_BLK")
        return logits[:, -1], _by_rows(changed["cache"]), chosen

    # The memory of cross-attention is the same at every step and for every beam: it is computed
    # here, by a step whose other results are not used, and not inside the loop.
    _, stepped, one = step(encoded_BLM, tokens_BL, jnp.zeros((batch, 1), jnp.int32), cache)
    cache = _with_cross(cache, stepped)
    # One row a beam, the beams of a sentence adjacent.
    encoded, tokens = (jnp.repeat(x, beams, axis=0) for x in (encoded_BLM, tokens_BL))

    record = _Record({k: x.shape[-1] for k, x in one.items()}, target_length, batch * beams)

    def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Mapping[str, Any]]:
        logits, new_cache, one = step(encoded, tokens, state.cur_token, state.cache)
        record.step(state, one)
        return logits, new_cache

    start_BT = jnp.zeros((batch, target_length), jnp.int32)
    sequences_BKT, scores_BK = beam_search(
        start_BT, cache, tokens_to_logits, EOS_ID, num_decodes=beams, alpha=alpha
    )
    best_BT = sequences_BKT[:, -1]
    return best_BT, scores_BK[:, -1], chosen | record.of(best_BT)


# On one device.
search = jax.jit(_search, static_argnames=("model", "target_length", "beams", "alpha", "routes"))


def jit_search(
    layout: Layout,
    model: nn.Module,
    target_length: int,
    beams: int,
    alpha: float,
    routes: bool = False,
) -> Any:
    """`search` over a mesh as one program of (params, {"encoder_input_tokens": tokens_BL}).

    Parameters lie in `Layout.shardings` and rows in parts (`Layout.batch`). Results come whole, so
    that every process can read them. To be traced within `Layout.axis_rules`.
    """

    def over_the_mesh(params: Any, batch: Mapping[str, jax.Array]):
        tokens_BL = batch["encoder_input_tokens"]
        return _search(model, params, tokens_BL, target_length, beams, alpha, routes)

    return jax.jit(over_the_mesh, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


@functools.lru_cache(maxsize=32)
def _program(*arguments: Any) -> distributed.SynchronizedProgram:
    return distributed.SynchronizedProgram(jit_search(*arguments), "the program of translations")


def search_over(
    layout: Layout,
    model: nn.Module,
    params: Any,
    tokens_BL: np.ndarray,
    target_length: int,
    beams: int,
    alpha: float,
    routes: bool = False,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The same as `search`, over a mesh; all processes call it with the same whole batch.

    B must be what `Layout.rows` gives.
    """
    program = _program(layout, model, target_length, beams, alpha, routes)
    with layout.axis_rules():
        return program(params, layout.batch({"encoder_input_tokens": tokens_BL}))


def _by_rows(cache: Any) -> Any:
    """The cache with what has rows, [rows, N, R, D], over the devices as rows and heads are.

    Left to the partitioner, what starts as zeros could lie whole on every device.
    """

    def place(x: jax.Array) -> jax.Array:
        return constrain(x, ("batch", "heads", None, "kv")) if x.ndim == 4 else x

    return jax.tree.map(place, cache)


class _Record:
    """Which experts every live beam chose at every step of a search; at its end, the best ones'.

    References, so that the search need not know of it: nothing but these small arrays is written.
    A beam is known by a hash of its tokens so far (a polynomial modulo 2^32); beams with the same
    tokens choose the same.
    """

    def __init__(self, choices: Mapping[str, int], length: int, rows: int) -> None:
        """choices: decoder layer -> K; without any, nothing is recorded. rows: B times beams."""
        self._chosen_TRK = {
            layer: jax.new_ref(jnp.zeros((length, rows, count), jnp.int32))
            for layer, count in choices.items()
        }
        self._prefix_TR = jax.new_ref(jnp.zeros((length, rows), jnp.uint32))
        powers = [pow(1_000_003, t, 1 << 32) for t in range(length + 1)]  # the start token's first
        self._powers = jnp.array(powers, jnp.uint32)

    def step(self, state: DecodingState, chosen: Mapping[str, jax.Array]) -> None:
        """What the live beams chose, [rows, 1, K] a layer."""
        if not chosen:
            return
        terms = state.sequences.astype(jnp.uint32) * self._powers[None]
        self._prefix_TR[state.cur_index] = jnp.sum(terms, axis=1, dtype=jnp.uint32)
        for layer, chosen_R1K in chosen.items():
            self._chosen_TRK[layer][state.cur_index] = chosen_R1K[:, 0]

    def of(self, best_BT: jax.Array) -> dict[str, jax.Array]:
        """Decoder layer -> the choices behind each token of the best sequences, [B, T, K]."""
        batch, length = best_BT.shape
        terms_BT = best_BT.astype(jnp.uint32) * self._powers[None, 1:]
        before_BT = jnp.cumsum(terms_BT, axis=1, dtype=jnp.uint32) - terms_BT
        prefix_TBK = self._prefix_TR[...].reshape(length, batch, -1)
        beam_TB = jnp.argmax(prefix_TBK == before_BT.T[:, :, None], axis=2)
        found = {}
        for layer, reference in self._chosen_TRK.items():
            chosen = reference[...].reshape(length, batch, prefix_TBK.shape[2], -1)
            chosen = jnp.take_along_axis(chosen, beam_TB[:, :, None, None], axis=2)[:, :, 0]
            found[layer] = jnp.where(best_BT[:, :, None] > 0, jnp.swapaxes(chosen, 0, 1), -1)
        return found


def _with_cross(cache: Mapping[str, Any], stepped: Mapping[str, Any]) -> dict[str, Any]:
    """`cache` with the cross-attention of `stepped`, marked as filled (`m4.model.attention`)."""
    if "cross_key" in cache:
        return {name: stepped[name] for name in ("cross_key", "cross_value")}
    return {
        name: _with_cross(value, stepped[name]) if isinstance(value, Mapping) else value
        for name, value in cache.items()
    }

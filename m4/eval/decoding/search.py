"""Beam search with a model: one compiled program for a batch, on one device or over a mesh."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m4.data.preprocess import EOS_ID
from m4.eval.decoding.beam import DecodingState, beam_search
from m4.eval.decoding.methods.constraints import constraints
from m4.eval.decoding.methods.sampling import sample
from m4.eval.decoding.settings import BEST, Method
from m4.model.layers import constrain
from m4.model.stack import unstack
from m4.parallel import distributed
from m4.parallel.layout import Layout

SHORTEST_STAGE = 32  # positions


def unstacked(model: Any, params: Any) -> tuple[Any, Any]:
    """Returns a model of scanned layers as one of single layers, any other as it is."""
    if not getattr(model, "scan_layers", False):
        return model, params
    return model.clone(scan_layers=False), unstack(params)


def _search(
    model: nn.Module,
    params: Any,
    tokens_BL: jax.Array,
    target_length: int,
    beams: int,
    alpha: float,
    method: Method = BEST,
    more: Mapping[str, jax.Array] | None = None,
    grows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns `method.n_best` sequences of each source, int32 [B, K, T], and scores [B, K].

    A beam search returns the best first. `tokens_BL` is int32, padded with 0; T is `target_length`.
    `more` has "forced_BT", the tokens that a translation begins with, "name_B", the seed of a row's
    random numbers, and "direction_B", the direction of a row for gates by task. With `grows` the
    cache grows with the translations (`stages`).

    `model` (static, by equality) follows T5X's contract; `params` are an argument, so that models
    of equal shape share the compiled program. Within `Layout.axis_rules` it is for that mesh.
    """
    # One layer after the other: beams are gathered along the first axis of what is cached.
    model, params = unstacked(model, params)
    more = more or {}
    copies = method.rows(beams)
    lengths = stages(target_length) if grows and method.sampling is None else [target_length]
    step = functools.partial(_step, model, {"params": params})
    direction_B = more.get("direction_B")
    encoded, cache = _encoded(model, {"params": params}, tokens_BL, lengths[0], direction_B)
    if direction_B is not None:
        each_R = jnp.repeat(direction_B, copies)
        step = functools.partial(step, **direction_ids(each_R, 1, "decoder"))
    # One row a beam, the beams of a sentence adjacent.
    encoded, tokens = (jnp.repeat(x, copies, axis=0) for x in (encoded, tokens_BL))

    def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Mapping[str, Any]]:
        logits, cache = step(encoded, tokens, state.cur_token, state.cache)
        return logits[:, -1], cache

    constrain = constraints(more.get("forced_BT"), method.min_length, method.no_repeat_ngram)
    if method.sampling is not None:
        return sample(
            more["name_B"], cache, tokens_to_logits, EOS_ID, method.n_best, alpha, target_length,
            method.sampling, constrain,
        )  # fmt: skip
    start_BT = jnp.zeros((tokens_BL.shape[0], target_length), jnp.int32)
    sequences_BKT, scores_BK = beam_search(
        start_BT, cache, tokens_to_logits, EOS_ID, num_decodes=beams, alpha=alpha,
        constrain=constrain, stages=lengths if grows else (),
    )  # fmt: skip
    best = slice(-1, -1 - method.n_best, -1)
    return sequences_BKT[:, best], scores_BK[:, best]


def direction_ids(direction_B: jax.Array | None, length: int, side: str) -> dict[str, Any]:
    """Returns the argument of a model with the direction of each token; none where unknown."""
    if direction_B is None:
        return {}
    return {f"{side}_direction_ids": jnp.repeat(direction_B[:, None], length, axis=1)}


def _encoded(
    model: nn.Module,
    variables: Any,
    tokens_BL: jax.Array,
    positions: int,
    direction_B: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Returns encoded sources [B, L, M], and the cache with which translations begin.

    The memory of cross-attention is the same at every step and for every beam: it is computed
    here, by a step whose other results are not used, and not inside the loop.
    """
    sources = direction_ids(direction_B, tokens_BL.shape[1], "encoder")
    encoded_BLM: Any = model.apply(
        variables, tokens_BL, enable_dropout=False, method="encode", **sources
    )
    sides = {**sources, **direction_ids(direction_B, positions, "decoder")}
    cache = _empty_cache(model, variables, tokens_BL, positions, sides)
    start_B1 = jnp.zeros((tokens_BL.shape[0], 1), jnp.int32)
    targets = direction_ids(direction_B, 1, "decoder")
    _, stepped = _step(model, variables, encoded_BLM, tokens_BL, start_B1, cache, **targets)
    return encoded_BLM, _with_cross(cache, stepped)


def _step(
    model: nn.Module,
    variables: Any,
    encoded: jax.Array,
    tokens: jax.Array,
    last: jax.Array,
    cache: Mapping[str, Any],
    **more: Any,
) -> tuple[jax.Array, Mapping[str, Any]]:
    """Returns logits of the next token, and the cache with what was computed of the last one."""
    changed: Any
    logits, changed = model.apply(
        {**variables, "cache": cache},
        encoded,
        tokens,
        last,
        last,
        enable_dropout=False,
        decode=True,
        max_decode_length=_cached_positions(cache),
        mutable=["cache"],
        method="decode",
        **more,
    )
    return logits, _by_rows(changed["cache"])


def stages(target_length: int) -> list[int]:
    """Returns the lengths of a growing cache: most translations end in the first half of T."""
    lengths = [target_length]
    while lengths[0] >= 2 * SHORTEST_STAGE:
        lengths.insert(0, -(-lengths[0] // 2))
    return lengths


def _cached_positions(cache: Mapping[str, Any]) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return next(x.shape[2] for path, x in leaves if path[-1].key == "cached_key")


def _empty_cache(
    model: nn.Module,
    variables: Any,
    tokens_BL: jax.Array,
    target_length: int,
    sides: Mapping[str, jax.Array],
) -> Any:
    """Returns an empty cache; its leaves start at zero, so the contract's shapes suffice."""
    full_BT = jax.ShapeDtypeStruct((tokens_BL.shape[0], target_length), jnp.int32)
    _, allocated = jax.eval_shape(
        functools.partial(model.apply, enable_dropout=False, decode=True, mutable=["cache"]),
        variables,
        encoder_input_tokens=tokens_BL,
        decoder_input_tokens=full_BT,
        decoder_target_tokens=full_BT,
        **sides,
    )
    return _by_rows(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), allocated["cache"]))


# On one device.
search = jax.jit(
    _search, static_argnames=("model", "target_length", "beams", "alpha", "method", "grows")
)


def jit_search(
    layout: Layout,
    model: nn.Module,
    target_length: int,
    beams: int,
    alpha: float,
    method: Method = BEST,
) -> Any:
    """Returns `search` over a mesh: one program of (params, {"encoder_input_tokens": ..., **more}).

    Parameters are sharded by `Layout.shardings` and rows by `Layout.batch`. Results are replicated,
    so that every process can read them. To be traced within `Layout.axis_rules`.
    """

    def over_the_mesh(params: Any, batch: Mapping[str, jax.Array]):
        more = {name: x for name, x in batch.items() if name != "encoder_input_tokens"}
        tokens_BL = batch["encoder_input_tokens"]
        return _search(model, params, tokens_BL, target_length, beams, alpha, method, more)

    return jit_over(layout, over_the_mesh)


def jit_over(layout: Layout, function: Callable[[Any, Mapping[str, jax.Array]], Any]) -> Any:
    """Jits a function of (params, batch) whose results every process can read."""
    return jax.jit(function, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


@functools.lru_cache(maxsize=96)
def _program(
    layout: Layout, what: str, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> distributed.SynchronizedProgram:
    return distributed.SynchronizedProgram(make(layout, *arguments), what)


def run_over(
    layout: Layout,
    what: str,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    params: Any,
    batch: Mapping[str, np.ndarray],
) -> Any:
    """Runs the jitted function `make(layout, *arguments)`, made once for equal arguments.

    All processes have the same batch; where they wait for each other it is called `what`.
    """
    program = _program(layout, what, make, arguments)
    with layout.axis_rules():
        return program(params, layout.batch(batch))


@functools.cache
def _on_one_device(function: Callable[..., Any]) -> Any:
    return jax.jit(function, static_argnames="model")


def _jit_model_over(layout: Layout, function: Callable[..., Any], model: nn.Module) -> Any:
    return jit_over(layout, functools.partial(function, model))


def run_model(
    layout: Layout | None,
    what: str,
    function: Callable[..., Any],
    model: nn.Module,
    params: Any,
    batch: Mapping[str, np.ndarray],
) -> Any:
    """Runs the jitted `function(model, params, batch)`, on one device or as `run_over` does."""
    if layout is None:
        return _on_one_device(function)(model, params, batch)
    return run_over(layout, what, _jit_model_over, (function, model), params, batch)


def _by_rows(cache: Any) -> Any:
    """Returns the cache with arrays of rows, [rows, N, R, D], sharded as rows and heads are.

    Left to the partitioner, what starts as zeros could be replicated on every device.
    """
    axes = ("batch", "heads", None, "kv")
    return jax.tree.map(lambda x: constrain(x, axes) if x.ndim == 4 else x, cache)


def _with_cross(cache: Mapping[str, Any], stepped: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `cache` with the cross-attention of `stepped`, which is filled."""
    if "cross_key" in cache:
        return {name: stepped[name] for name in ("cross_key", "cross_value")}
    return {
        name: _with_cross(value, stepped[name]) if isinstance(value, Mapping) else value
        for name, value in cache.items()
    }

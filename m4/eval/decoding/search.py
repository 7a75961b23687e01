"""Beam search with a model as one compiled program, on one device or over a mesh."""

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
from m4.eval.decoding.sampling import Sampling, sample
from m4.model.layers import constrain
from m4.model.stack import unstack
from m4.parallel import distributed
from m4.parallel.mesh import Layout

SHORTEST_STAGE = 16  # positions


def unstacked(model: Any, params: Any) -> tuple[Any, Any]:
    """Returns a model with scanned layers as one with single layers, or any other unchanged."""
    if not getattr(model, "scan_layers", False):
        return model, params
    return model.clone(scan_layers=False), unstack(params)


def search_batch(
    model: nn.Module,
    params: Any,
    batch: Mapping[str, jax.Array],
    target_length: int,
    beams: int,
    alpha: float,
    n_best: int = 1,
    sampling: Sampling | None = None,
    min_length: int = 0,
    no_repeat_ngram: int = 0,
    grows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns `n_best` sequences of each source, int32 [B, K, T], and scores [B, K].

    A beam search returns the best first. `batch` has "encoder_input_tokens", int32 [B, L] padded
    with 0, and if needed "inputs_BT", the tokens that a translation begins with (`beam_search`),
    "name_B", the seed of a row's random numbers, and "direction_B", the direction of a row for
    gates by task. T is `target_length`. With `grows`, the cache grows with the translations
    (`stages`).

    `model` (static, compared by equality) follows T5X's contract; `params` are an argument, so that
    models of equal shape share the compiled program. `Layout.axis_rules` sets the mesh.
    """
    # Layers are unstacked, as beams are gathered along the first axis of the cache.
    model, params = unstacked(model, params)
    tokens_BL, direction_B = batch["encoder_input_tokens"], batch.get("direction_B")
    copies = n_best if sampling else beams  # live hypotheses of a sentence
    lengths = stages(target_length) if grows and not sampling else [target_length]
    step = functools.partial(_step, model, {"params": params})
    encoded, cache = _encoded(model, {"params": params}, tokens_BL, lengths[0], direction_B)
    if direction_B is not None:
        each_R = jnp.repeat(direction_B, copies)
        step = functools.partial(step, **direction_ids(each_R, 1, "decoder"))
    # One row per beam; the beams of a sentence are adjacent.
    encoded, tokens = (jnp.repeat(x, copies, axis=0) for x in (encoded, tokens_BL))

    def tokens_to_logits(state: DecodingState) -> tuple[jax.Array, Mapping[str, Any]]:
        logits, cache = step(encoded, tokens, state.cur_token, state.cache)
        return logits[:, -1], cache

    inputs_BT = batch.get("inputs_BT", jnp.zeros((tokens_BL.shape[0], target_length), jnp.int32))
    if sampling is not None:
        return sample(
            inputs_BT, batch["name_B"], cache, tokens_to_logits, EOS_ID, n_best, alpha, sampling,
            min_length, no_repeat_ngram,
        )  # fmt: skip
    sequences_BKT, scores_BK = beam_search(
        inputs_BT, cache, tokens_to_logits, EOS_ID, num_decodes=beams, alpha=alpha,
        stages=lengths if grows else (), min_length=min_length, no_repeat_ngram=no_repeat_ngram,
    )  # fmt: skip
    best = slice(-1, -1 - n_best, -1)
    return sequences_BKT[:, best], scores_BK[:, best]


def direction_ids(direction_B: jax.Array | None, length: int, side: str) -> dict[str, Any]:
    """Returns a model's argument with the direction of each token, or none if unknown."""
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
    """Returns encoded sources [B, L, M], and the initial cache of translations."""
    sources = direction_ids(direction_B, tokens_BL.shape[1], "encoder")
    encoded_BLM: Any = model.apply(
        variables, tokens_BL, enable_dropout=False, method="encode", **sources
    )
    # The cache's leaves start at zero, so the contract's shapes suffice.
    sides = {**sources, **direction_ids(direction_B, positions, "decoder")}
    full_BT = jax.ShapeDtypeStruct((tokens_BL.shape[0], positions), jnp.int32)
    run = functools.partial(model.apply, enable_dropout=False, decode=True, mutable=["cache"])
    _, allocated = jax.eval_shape(run, variables, tokens_BL, full_BT, full_BT, **sides)
    cache = _by_rows(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), allocated["cache"]))
    start_B1 = jnp.zeros((tokens_BL.shape[0], 1), jnp.int32)
    targets = direction_ids(direction_B, 1, "decoder")
    # Keys and values of cross-attention are the same at every step and for every beam. They are
    # taken from one step outside the loop, whose other results are not used.
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
    """Returns logits of the next token, and the cache after the last one."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    positions = next(x.shape[2] for path, x in leaves if path[-1].key == "cached_key")
    changed: Any
    logits, changed = model.apply(
        {**variables, "cache": cache}, encoded, tokens, last, last, enable_dropout=False,
        decode=True, max_decode_length=positions, mutable=["cache"], method="decode", **more,
    )  # fmt: skip
    return logits, _by_rows(changed["cache"])


def stages(target_length: int) -> list[int]:
    """Returns the lengths of a growing cache, even except for T; most translations end early."""
    lengths = [target_length]
    while lengths[0] >= 2 * SHORTEST_STAGE:
        lengths.insert(0, -(-lengths[0] // 4) * 2)
    return lengths


# On one device.
search = jax.jit(
    search_batch,
    static_argnames=[
        "model", "target_length", "beams", "alpha", "n_best", "sampling", "min_length",
        "no_repeat_ngram", "grows",
    ],
)  # fmt: skip


def jit_over(
    layout: Layout | None, function: Callable[..., Any], model: nn.Module, *options: Any
) -> Any:
    """Jits `function(model, params, batch, *options)` as a function of (params, batch).

    Over a mesh, parameters are sharded by `Layout.shardings` and rows by `Layout.batch`. Results
    are replicated, so that every process can read them. Trace it within `Layout.axis_rules`.
    """

    def program(params: Any, batch: Mapping[str, jax.Array]) -> Any:
        return function(model, params, batch, *options)

    if layout is None:
        return jax.jit(program)
    return jax.jit(program, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


@functools.lru_cache(maxsize=96)
def _program(layout: Layout | None, what: str, *arguments: Any) -> Callable[..., Any]:
    return distributed.synchronized(jit_over(layout, *arguments), what)


def run_model(
    layout: Layout | None,
    what: str,
    function: Callable[..., Any],
    model: nn.Module,
    params: Any,
    batch: Mapping[str, np.ndarray],
    *options: Any,
) -> Any:
    """Runs `function(model, params, batch, *options)` through `jit_over`.

    All processes have the same batch. `what` names the program if they time out waiting.
    """
    program = _program(layout, what, function, model, *options)
    if layout is None:
        return program(params, batch)
    with layout.axis_rules():
        return program(params, layout.batch(batch))


def _by_rows(cache: Any) -> Any:
    """Returns the cache with its arrays [rows, N, R, D] sharded by rows and heads."""
    axes = ("batch", "heads", None, "kv")  # otherwise zeros could be replicated
    return jax.tree.map(lambda x: constrain(x, axes) if x.ndim == 4 else x, cache)


def _with_cross(cache: Mapping[str, Any], stepped: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `cache` with the filled cross-attention of `stepped`."""
    if "cross_key" in cache:
        return {name: stepped[name] for name in ("cross_key", "cross_value")}
    return {
        name: _with_cross(value, stepped[name]) if isinstance(value, Mapping) else value
        for name, value in cache.items()
    }

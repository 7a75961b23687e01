"""Sampled translations: temperature, top-k and top-p (Holtzman et al. 2020).

Axes: B sentences, K samples of each, T target length, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from m4.eval.decoding.beam import (
    NEG_INF,
    TokensToLogits,
    constrained,
    expand_cache,
    length_penalty,
    next_logp,
)
from m4.settings import MUTABLE, Between, Count, checked


@checked
@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, which replaces beam search.

    Attributes:
        temperature: Divisor of log-probabilities: below 1 they become sharper, above 1 flatter.
        top_k: Number of most probable tokens to draw from; 0 means all.
        top_p: Probability of the most probable tokens, together, to draw from.
        seed: Seed of the draws. A sentence's draw depends on the seed, the sentence and the
            number of the sample, not on its batch.
    """

    temperature: Annotated[float, Between(0, 1e3, above=True), MUTABLE] = 1.0
    top_k: Annotated[Count, MUTABLE] = 0
    top_p: Annotated[float, Between(0, 1, above=True), MUTABLE] = 1.0
    seed: Annotated[Count, MUTABLE] = 0


def filtered(logp_BKV: Array, sampling: Sampling) -> Array:
    """Returns logits to draw from: divided by the temperature, with `NEG_INF` for excluded tokens.

    top-p applies after top-k. Tokens as probable as the last one kept are kept.
    """
    x_BKV = logp_BKV / sampling.temperature
    vocab = x_BKV.shape[-1]
    if 0 < sampling.top_k < vocab:
        least_BK1 = lax.top_k(x_BKV, sampling.top_k)[0][..., -1:]
        x_BKV = jnp.where(x_BKV >= least_BK1, x_BKV, NEG_INF)
    if sampling.top_p < 1:
        sorted_BKV = -jnp.sort(-x_BKV, axis=-1)
        p_BKV = jax.nn.softmax(sorted_BKV)
        before_BKV = jnp.cumsum(p_BKV, axis=-1) - p_BKV  # sum over more probable tokens
        kept_BKV = jnp.where(before_BKV < sampling.top_p, sorted_BKV, jnp.inf)
        x_BKV = jnp.where(x_BKV >= kept_BKV.min(axis=-1, keepdims=True), x_BKV, NEG_INF)
    return x_BKV


class _Drawn(NamedTuple):
    step: Array  # scalar int32
    sequences_BKT: Array  # T+1 columns, the first is the start token
    logp_BK: Array
    ended_BK: Array
    cache: Any


def sample(
    inputs_BT: Array,
    name_B: Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    samples: int,
    alpha: float,
    sampling: Sampling,
    min_length: int = 0,
    no_repeat_ngram: int = 0,
) -> tuple[Array, Array]:
    """Returns `samples` translations of each row, in the order of drawing.

    Args:
      inputs_BT, cache, tokens_to_logits, min_length, no_repeat_ngram: See `beam_search`.
      name_B: uint32; decides the random numbers of a row, with seed, sample and step.

    Returns:
      (int32 [B, K, T], float32 [B, K]): sequences with EOS and zeros after it, and their
      log-probabilities by the model, divided by the length penalty.
    """
    batch, length = inputs_BT.shape
    forced_BT = jnp.pad(inputs_BT, ((0, 0), (0, 1)))
    keys_BK = _keys(sampling.seed, name_B, samples)

    def advance(drawn: _Drawn) -> _Drawn:
        step, before_BKT = drawn.step, drawn.sequences_BKT
        logp_BKV, new_cache = next_logp(step, before_BKT, drawn.cache, tokens_to_logits)
        allowed_BKV = constrained(logp_BKV, before_BKT, step, eos_id, min_length, no_repeat_ngram)
        next_BK = _draw(keys_BK, step, filtered(allowed_BKV, sampling))
        logp_BK = jnp.take_along_axis(logp_BKV, next_BK[:, :, None], axis=2)[:, :, 0]
        forced_B1 = lax.dynamic_slice_in_dim(forced_BT, step + 1, 1, axis=1)
        logp_BK = jnp.where(drawn.ended_BK | (forced_B1 > 0), 0.0, logp_BK)
        next_BK = jnp.where(forced_B1 > 0, forced_B1, jnp.where(drawn.ended_BK, 0, next_BK))
        tokens_BKT = lax.dynamic_update_slice_in_dim(
            before_BKT, next_BK[:, :, None], step + 1, axis=2
        )
        ended_BK = drawn.ended_BK | (next_BK == eos_id)
        return _Drawn(step + 1, tokens_BKT, drawn.logp_BK + logp_BK, ended_BK, new_cache)

    begin = _Drawn(
        jnp.zeros((), jnp.int32),
        jnp.zeros((batch, samples, length + 1), jnp.int32),
        jnp.zeros((batch, samples), jnp.float32),
        jnp.zeros((batch, samples), bool),
        expand_cache(cache, samples),
    )
    end = lax.while_loop(
        lambda drawn: (drawn.step < length) & ~jnp.all(drawn.ended_BK), advance, begin
    )
    tokens_BKT = end.sequences_BKT[:, :, 1:]
    ends_BKT = tokens_BKT == eos_id
    # Tokens of each with its EOS, or T if it has none.
    count_BK = jnp.where(ends_BKT.any(axis=2), ends_BKT.argmax(axis=2) + 1, length)
    return tokens_BKT, end.logp_BK / length_penalty(alpha, count_BK)


def _keys(seed: int, name_B: Array, samples: int) -> Array:
    """Returns a key for each sample of each row, [B, K]."""
    key_of = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    key_B = key_of(jax.random.key(seed), name_B)
    return jax.vmap(key_of, in_axes=(0, None))(key_B, jnp.arange(samples))


def _draw(keys_BK: Array, step: Array, logits_BKV: Array) -> Array:
    """Returns a token of each row by its own key, int32 [B, K]."""
    draw = jax.vmap(
        jax.vmap(lambda key, x: jax.random.categorical(jax.random.fold_in(key, step), x))
    )
    return draw(keys_BK, logits_BKV).astype(jnp.int32)

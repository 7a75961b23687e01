"""Translations that are drawn: temperature, top-k and top-p (Holtzman et al. 2020).

B sentences, K samples of each, T target length, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from m4.eval.decoding.beam import (
    NEG_INF,
    DecodingState,
    TokensToLogits,
    expand_cache,
    length_penalty,
)
from m4.eval.decoding.methods.constraints import Constrain
from m4.settings import MUTABLE, Between, Count, checked


@checked
@dataclass(frozen=True)
class Sampling:
    """Draws translations in the place of beam search.

    Attributes:
        temperature: log-probabilities are divided by it; below 1 sharper, above 1 flatter.
        top_k: only the k most probable tokens; 0: all.
        top_p: only the most probable tokens that have this probability together.
        seed: another one draws others. A sentence's draw depends on it, on the sentence and on the
            number of the sample, not on its batch.
    """

    temperature: Annotated[float, Between(0, 1e3, above=True), MUTABLE] = 1.0
    top_k: Annotated[Count, MUTABLE] = 0
    top_p: Annotated[float, Between(0, 1, above=True), MUTABLE] = 1.0
    seed: Annotated[Count, MUTABLE] = 0


def filtered(logp_BKV: Array, sampling: Sampling) -> Array:
    """The logits to draw from: divided by the temperature, `NEG_INF` where a token is left out.

    top-p is taken of what top-k leaves. Tokens as probable as the last one kept are kept.
    """
    x_BKV = logp_BKV / sampling.temperature
    vocab = x_BKV.shape[-1]
    if 0 < sampling.top_k < vocab:
        least_BK1 = lax.top_k(x_BKV, sampling.top_k)[0][..., -1:]
        x_BKV = jnp.where(x_BKV >= least_BK1, x_BKV, NEG_INF)
    if sampling.top_p < 1:
        sorted_BKV = -jnp.sort(-x_BKV, axis=-1)
        p_BKV = jax.nn.softmax(sorted_BKV)
        before_BKV = jnp.cumsum(p_BKV, axis=-1) - p_BKV  # of the more probable ones
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
    name_B: Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    samples: int,
    alpha: float,
    length: int,
    sampling: Sampling,
    constrain: Constrain | None = None,
) -> tuple[Array, Array]:
    """`samples` translations of each row, in the order in which they are drawn.

    Args:
      name_B: uint32, what the random numbers of a row are made of, with seed, sample and step.
      cache, tokens_to_logits: as of `beam_search`. length: T.

    Returns:
      (int32 [B, K, T], float32 [B, K]): sequences with EOS, zeros after it; the model's
      log-probability of each, divided by the length penalty of its tokens.
    """
    batch = name_B.shape[0]
    keys_BK = _keys(sampling.seed, name_B, samples)

    def advance(drawn: _Drawn) -> _Drawn:
        step = drawn.step
        token_BK = lax.dynamic_index_in_dim(drawn.sequences_BKT, step, axis=2, keepdims=False)
        logits, new_cache = tokens_to_logits(
            DecodingState(
                cur_index=step,
                sequences=drawn.sequences_BKT.reshape(batch * samples, -1),
                cur_token=token_BK.reshape(batch * samples, 1),
                cache=drawn.cache,
            )
        )
        logp_BKV = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(batch, samples, -1)
        allowed_BKV = logp_BKV
        if constrain is not None:
            allowed_BKV = constrain(logp_BKV, drawn.sequences_BKT, step)
        next_BK = _draw(keys_BK, step, filtered(allowed_BKV, sampling))
        logp_BK = jnp.take_along_axis(logp_BKV, next_BK[:, :, None], axis=2)[:, :, 0]
        next_BK = jnp.where(drawn.ended_BK, 0, next_BK)
        return _Drawn(
            step + 1,
            lax.dynamic_update_slice_in_dim(
                drawn.sequences_BKT, next_BK[:, :, None], step + 1, axis=2
            ),
            drawn.logp_BK + jnp.where(drawn.ended_BK, 0.0, logp_BK),
            drawn.ended_BK | (next_BK == eos_id),
            new_cache,
        )

    end = lax.while_loop(
        lambda drawn: (drawn.step < length) & ~jnp.all(drawn.ended_BK),
        advance,
        _Drawn(
            jnp.zeros((), jnp.int32),
            jnp.zeros((batch, samples, length + 1), jnp.int32),
            jnp.zeros((batch, samples), jnp.float32),
            jnp.zeros((batch, samples), bool),
            expand_cache(cache, samples),
        ),
    )
    tokens_BKT = end.sequences_BKT[:, :, 1:]
    ends_BKT = tokens_BKT == eos_id
    # Tokens of each with its EOS; all T where it has none.
    count_BK = jnp.where(ends_BKT.any(axis=2), ends_BKT.argmax(axis=2) + 1, length)
    return tokens_BKT, end.logp_BK / length_penalty(alpha, count_BK)


def _keys(seed: int, name_B: Array, samples: int) -> Array:
    """A key for each sample of each row, [B, K]."""
    key_of = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    key_B = key_of(jax.random.key(seed), name_B)
    return jax.vmap(key_of, in_axes=(0, None))(key_B, jnp.arange(samples))


def _draw(keys_BK: Array, step: Array, logits_BKV: Array) -> Array:
    """A token of each row by its own key: int32 [B, K]."""

    def one(key: Array, logits_V: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(key, step), logits_V)

    return jax.vmap(jax.vmap(one))(keys_BK, logits_BKV).astype(jnp.int32)

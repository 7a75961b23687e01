"""Constraints of a translation: one function of log-probabilities, for every search."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from m4.data.preprocess import EOS_ID

NEG_INF = -1.0e7  # "minus infinity" that survives float32 sums; part of T5X's contract
# (logp [B, K, V], sequences [B, K, T+1], step) -> logp [B, K, V]
Constrain = Callable[[Array, Array, Array], Array]


def constraints(
    forced_BT: Array | None = None, min_length: int = 0, no_repeat_ngram: int = 0
) -> Constrain | None:
    """Returns `constrain` with these rules, or None where there are none."""
    if forced_BT is None and not min_length and not no_repeat_ngram:
        return None
    return functools.partial(
        constrain, forced_BT=forced_BT, min_length=min_length, no_repeat_ngram=no_repeat_ngram
    )


def constrain(
    logp_BKV: Array,
    sequences_BKT: Array,
    step: Array,
    *,
    forced_BT: Array | None = None,
    min_length: int = 0,
    no_repeat_ngram: int = 0,
) -> Array:
    """Returns `logp_BKV` of the next token with `NEG_INF` for tokens that may not come.

    It is not normalised again: a translation's score stays the model's.

    Args:
      sequences_BKT: int32 [B, K, T+1]: the start token, then `step` tokens.
      step: scalar int32, tokens so far.
      forced_BT: int32, the tokens that the translation of each row begins with, then zeros. They
        come whatever the other rules say.
      min_length: tokens before EOS.
      no_repeat_ngram: n; no n tokens come twice. 0: they may.
    """
    vocab_11V = jnp.arange(logp_BKV.shape[-1])[None, None]
    banned_BKV = jnp.zeros(logp_BKV.shape, bool)
    if no_repeat_ngram:
        banned_BKV = repeats(sequences_BKT, step, no_repeat_ngram, logp_BKV.shape[-1])
    if min_length:
        banned_BKV |= (vocab_11V == EOS_ID) & (step < min_length)
    if forced_BT is not None:
        # Past the end nothing is forced.
        padded_BT = jnp.pad(forced_BT, ((0, 0), (0, sequences_BKT.shape[-1])))
        forced_B11 = lax.dynamic_index_in_dim(padded_BT, step, axis=1)[:, :, None]
        banned_BKV = jnp.where(forced_B11 > 0, vocab_11V != forced_B11, banned_BKV)
    return jnp.where(banned_BKV, NEG_INF, logp_BKV)


def repeats(sequences_BKT: Array, step: Array, n: int, vocab: int) -> Array:
    """Returns the tokens that would end an n-gram that the sequence has already, bool [B, K, V]."""
    length = sequences_BKT.shape[-1]
    if n >= length:
        return jnp.zeros((*sequences_BKT.shape[:2], vocab), bool)
    # Windows of n - 1 tokens begin at 0, 1, ...; `last` is what followed each of them.
    starts_11T = jnp.arange(length - n + 1)[None, None]
    same_BKT = (starts_11T >= 1) & (starts_11T + n - 1 <= step)
    for offset in range(n - 1):
        said_BK1 = lax.dynamic_index_in_dim(sequences_BKT, step - n + 2 + offset, axis=2)
        same_BKT &= sequences_BKT[:, :, offset : offset + length - n + 1] == said_BK1
    last_BKT = sequences_BKT[:, :, n - 1 :]
    batch, beams = sequences_BKT.shape[:2]
    b_B11, k_1K1 = jnp.arange(batch)[:, None, None], jnp.arange(beams)[None, :, None]
    return (
        jnp.zeros((batch, beams, vocab), bool)
        .at[b_B11, k_1K1, last_BKT]
        .max(jnp.broadcast_to(same_BKT, last_BKT.shape))
    )

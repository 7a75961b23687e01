"""Constraints of a translation: one function of log-probabilities, for every search."""

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
    """Returns a function of the next token's log-probabilities, or None where there are no rules.

    It gives `NEG_INF` to tokens that may not come. The rest is not normalised again: a
    translation's score stays the model's. Its sequences are int32 [B, K, T+1], the start token and
    then `step` tokens.

    Args:
      forced_BT: int32, the tokens that the translation of each row begins with, then zeros. They
        come whatever the other rules say.
      min_length: tokens before EOS.
      no_repeat_ngram: n; no n tokens come twice. 0: they may.
    """
    if forced_BT is None and not min_length and not no_repeat_ngram:
        return None

    def constrain(logp_BKV: Array, sequences_BKT: Array, step: Array) -> Array:
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

    return constrain


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

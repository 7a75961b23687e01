"""Flat beam search (GShard, appendix A.1): the beams of a sentence are one sequence.

The K tokens of a step are K neighbouring positions of one interleaved sequence of K * T, of which
keys and values are kept once and never moved. A mask of zeros and ones says which positions are the
past of a beam; only the mask is reordered. Attention is over K times more positions. The search is
that of `beam_search`, with the same translations and scores.

B sentences, K beams, T target length, R = K * T positions of the interleaved sequence.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from m4.eval.decoding.beam import CacheOfBeams, grow_cache


def with_past(cache: Any, beams: int, length: int, batch: int) -> dict[str, Any]:
    """Returns the cache of a flat search: the model's, [B, N, R, D], and `past_BKR`."""
    return {"past_BKR": jnp.zeros((batch, beams, beams * length), bool), "model": cache}


def with_present(past_BKR: Array, step: Array) -> Array:
    """Returns the mask with the position of each beam's present token, K * step + k, too."""
    beams = past_BKR.shape[1]
    here_KR = jnp.arange(past_BKR.shape[2])[None] == (beams * step + jnp.arange(beams))[:, None]
    return past_BKR | here_KR[None]


def _reordered(cache: Any, beam_BK: Array) -> Any:
    past_BKR = jnp.take_along_axis(cache["past_BKR"], beam_BK[:, :, None], axis=1)
    return {**cache, "past_BKR": past_BKR}


def _grown(cache: Any, length: int) -> Any:
    past_BKR = cache["past_BKR"]
    positions = past_BKR.shape[1] * length
    past_BKR = jnp.pad(past_BKR, [(0, 0), (0, 0), (0, positions - past_BKR.shape[2])])
    return {"past_BKR": past_BKR, "model": grow_cache(cache["model"], positions)}


INTERLEAVED = CacheOfBeams(lambda cache, beams: cache, _reordered, _grown)

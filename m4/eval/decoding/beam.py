"""Beam search as one `lax.while_loop`, with the semantics of T5X's `decoding.beam_search`.

B sentences (batch), K beams, T target length, V vocabulary; a trailing 2K or 3K is a set of
candidates. Live beams are the hypotheses that have not ended, finished beams those with an EOS.
Both sets are kept in ascending order, so that the best of each is at [:, -1].

Each step takes the 2K best of the K*V continuations: those with EOS compete for the finished set by
score = log-probability / length_penalty(alpha, tokens incl. EOS), the K best others live on. The
loop ends when no live beam of any row can still beat the worst of K finished ones. Until then a row
that is done is searched further, but its finished set cannot change: rows do not influence each
other (only a `min_log_prob` looks at all rows together).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from m4.eval.decoding.methods.constraints import NEG_INF, Constrain
from m4.eval.decoding.top_k import top_k

# Cache leaves without a beam axis. `cache_index` has one only after a prefill, where each row has a
# separate position.
_BEAMLESS = ("cached_bias", "position_embedder_index")
_INDEX = "cache_index"
# Leaves that depend on the source only are equal for all beams of a sentence: no reordering.
_SHARED_PREFIX = "cross_"


class DecodingState(NamedTuple):
    """The state that a model may look at when it scores the next token.

    cur_index: scalar int32, the number of steps done.
    sequences: int32 [B*K, T+1], live hypotheses; column 0 is the start token 0.
    cur_token: int32 [B*K, 1], the last token of each.
    cache: nested mapping of arrays, leading axis B*K but for the leaves without beams.
    """

    cur_index: Array
    sequences: Array
    cur_token: Array
    cache: Mapping[str, Any]


TokensToLogits = Callable[[DecodingState], tuple[Array, Mapping[str, Any]]]


class _Search(NamedTuple):
    step: Array  # scalar int32
    live_logp_BK: Array
    live_BKT: Array  # T+1 columns, as all sequences inside the search
    finished_score_BK: Array
    finished_BKT: Array
    is_finished_BK: Array  # False marks an empty slot of the finished set
    cache: Any


def length_penalty(alpha: float, length: Array | int) -> Array:
    """Returns ((5 + length) / 6) ** alpha, which divides a log-probability (GNMT, equation 14)."""
    return jnp.power((5.0 + jnp.asarray(length, jnp.float32)) / 6.0, alpha)


def _leaf_name(path: tuple[Any, ...]) -> str:
    return str(getattr(path[-1], "key", path[-1]))


def expand_cache(cache: Any, beams: int, axis: int = 0, prefilled: bool = False) -> Any:
    """Repeats the batch axis of every leaf `beams` times, adjacent: [B, ...] -> [B*K, ...]."""
    beamless = _BEAMLESS if prefilled else (*_BEAMLESS, _INDEX)

    def expand(path: tuple[Any, ...], x: Array) -> Array:
        return x if _leaf_name(path) in beamless else jnp.repeat(x, beams, axis=axis)

    return jax.tree_util.tree_map_with_path(expand, cache)


def reorder_cache(cache: Any, beam_BK: Array, axis: int = 0, prefilled: bool = False) -> Any:
    """Gives new beam k of a sentence the state of its old beam `beam_BK[b, k]`; leaves [B*K, ...].

    A gather inside each sentence: it moves each byte once and stays local when B is sharded.
    """
    beamless = _BEAMLESS if prefilled else (*_BEAMLESS, _INDEX)
    batch, beams = beam_BK.shape
    if beams == 1:
        return cache

    def reorder(path: tuple[Any, ...], x: Array) -> Array:
        name = _leaf_name(path)
        if name in beamless or name.startswith(_SHARED_PREFIX):
            return x
        unflat = x.reshape(*x.shape[:axis], batch, beams, *x.shape[axis + 1 :])
        index = beam_BK.reshape((1,) * axis + (batch, beams) + (1,) * (x.ndim - axis - 1))
        # Top-k's indices need no check.
        moved = jnp.take_along_axis(unflat, index, axis=axis + 1, mode="promise_in_bounds")
        return moved.reshape(x.shape)

    return jax.tree_util.tree_map_with_path(reorder, cache)


def grow_cache(cache: Any, length: int) -> Any:
    """Makes room for keys and values [rows, N, R, D] of `length` positions, zeros in new ones."""

    def grow(path: tuple[Any, ...], x: Array) -> Array:
        if _leaf_name(path) not in ("cached_key", "cached_value"):
            return x
        return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)])

    return jax.tree_util.tree_map_with_path(grow, cache)


class CacheOfBeams(NamedTuple):
    """Functions that keep what beams have computed, like the three above.

    `expand` makes it of a cache with a row a sentence, `reorder` gives each beam what its parent
    has, `grow` makes room for so many tokens.
    """

    expand: Callable[[Any, int, int, bool], Any]
    reorder: Callable[[Any, Array, int, bool], Any]
    grow: Callable[[Any, int], Any]


COPIED = CacheOfBeams(expand_cache, reorder_cache, grow_cache)


def _pick(index_BK: Array, *arrays: Array) -> tuple[Array, ...]:
    """Returns the entries `index_BK` along axis 1 of arrays [B, N] or [B, N, T]."""
    return tuple(
        jnp.take_along_axis(x, index_BK.reshape(index_BK.shape + (1,) * (x.ndim - 2)), axis=1)
        for x in arrays
    )


def _best(score_BN: Array, beams: int) -> Array:
    """Returns indices of the highest scores, ascending; of ties the lower index is best."""
    return jnp.flip(top_k(score_BN, beams)[1], axis=1)


def _continuations(
    logits: Array, search: _Search, forced_B1: Array, constrain: Constrain | None
) -> tuple[Array, Array, Array]:
    """Returns the 2K best continuations, best first, of logits [B*K, V]: [B, 2K] each.

    Their log-probabilities, next tokens and parents (which beam each continues). 2K, because K of
    them may end here and K must live on. Where a row's next token is forced (not 0) all have it.
    """
    (batch, beams), vocab = search.live_logp_BK.shape, logits.shape[-1]
    logp_BKV = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(batch, beams, vocab)
    if constrain is not None:
        logp_BKV = constrain(logp_BKV, search.live_BKT, search.step)
    logp_BKV = logp_BKV + search.live_logp_BK[:, :, None]
    logp_B2K, flat_B2K = top_k(logp_BKV.reshape(batch, -1), 2 * beams)
    parent_B2K, token_B2K = flat_B2K // vocab, flat_B2K % vocab
    # Inside a forced prefix one candidate of a row is alive: equal beams would stay equal.
    only_first_B2K = jnp.where(jnp.arange(2 * beams) == 0, 0.0, NEG_INF)[None]
    logp_B2K = jnp.where(forced_B1 == 0, logp_B2K, only_first_B2K)
    token_B2K = jnp.where(forced_B1 == 0, token_B2K, forced_B1)
    return logp_B2K, token_B2K, parent_B2K


def _beginning(start_B: Array, beams: int, length: int, cache: Any) -> _Search:
    """Returns a search with one live beam a row, of its start token; none is finished."""
    batch = start_B.shape[0]
    zeros_BKT = jnp.zeros((batch, beams, length + 1), jnp.int32)
    first_K = jnp.where(jnp.arange(beams) == 0, 0.0, NEG_INF).astype(jnp.float32)
    return _Search(
        step=jnp.zeros((), jnp.int32),
        live_logp_BK=jnp.broadcast_to(first_K, (batch, beams)),
        live_BKT=zeros_BKT.at[:, :, 0].set(start_B[:, None]),
        finished_score_BK=jnp.full((batch, beams), NEG_INF, jnp.float32),
        finished_BKT=zeros_BKT,
        is_finished_BK=jnp.zeros((batch, beams), bool),
        cache=cache,
    )


def _best_finished(
    search: _Search, seq_B2KT: Array, score_B2K: Array, ends_B2K: Array
) -> tuple[Array, Array, Array]:
    """Returns the K best of the finished and of the candidates that end."""
    score_B2K = score_B2K + jnp.where(ends_B2K, 0.0, NEG_INF)
    score_B3K = jnp.concatenate([search.finished_score_BK, score_B2K], axis=1)
    finished_BKT, score_BK, is_finished_BK = _pick(
        _best(score_B3K, search.live_logp_BK.shape[1]),
        jnp.concatenate([search.finished_BKT, seq_B2KT], axis=1),
        score_B3K,
        jnp.concatenate([search.is_finished_BK, ends_B2K], axis=1),
    )
    return finished_BKT, score_BK, is_finished_BK


class _Rules(NamedTuple):
    """Constants of a search: the arguments of `beam_search`, and what follows from them."""

    tokens_to_logits: TokensToLogits
    eos_id: int
    alpha: float
    length: int
    max_decode_step: int
    min_log_prob: float
    cache_axis: int
    prefilled: bool
    offset_B: Array  # tokens of a row's prefix that are in the cache already
    forced_BT: Array  # column t is the token of position t that is forced; 0: none
    constrain: Constrain | None
    cache_of: CacheOfBeams


def _continues(rules: _Rules, search: _Search) -> Array:
    # T5X counts the start token here, so the bound on a live score is the penalty of length + 1.
    largest_penalty = length_penalty(rules.alpha, rules.length + 1)
    best_live_B = search.live_logp_BK[:, -1] / largest_penalty
    worst_B = jnp.min(search.finished_score_BK, axis=1)
    full_B = jnp.all(search.is_finished_BK, axis=1)
    done = jnp.all(jnp.where(full_B, worst_B, NEG_INF) > best_live_B)
    hopeless = jnp.all(best_live_B < rules.min_log_prob / largest_penalty) & (search.step > 0)
    at_end = search.step + jnp.min(rules.offset_B) >= rules.length
    out_of_steps = (rules.max_decode_step > 0) & (search.step >= rules.max_decode_step)
    return ~(done | hopeless | at_end | out_of_steps)


def _advance(rules: _Rules, search: _Search) -> _Search:
    step, (batch, beams) = search.step, search.live_logp_BK.shape
    token_BK = lax.dynamic_index_in_dim(search.live_BKT, step, axis=2, keepdims=False)
    logits, new_cache = rules.tokens_to_logits(
        DecodingState(
            cur_index=step,
            sequences=search.live_BKT.reshape(batch * beams, -1),
            cur_token=token_BK.reshape(batch * beams, 1),
            cache=search.cache,
        )
    )
    forced_B1 = lax.dynamic_slice_in_dim(rules.forced_BT, step + 1, 1, axis=1)
    logp_B2K, token_B2K, parent_B2K = _continuations(logits, search, forced_B1, rules.constrain)
    (seq_B2KT,) = _pick(parent_B2K, search.live_BKT)
    seq_B2KT = lax.dynamic_update_slice_in_dim(seq_B2KT, token_B2K[:, :, None], step + 1, 2)
    ends_B2K = token_B2K == rules.eos_id
    if rules.constrain is not None:  # an end that is not allowed is none
        ends_B2K &= logp_B2K > NEG_INF / 2

    live_logp_B2K = logp_B2K + jnp.where(ends_B2K, NEG_INF, 0.0)
    best_BK = _best(live_logp_B2K, beams)
    live_BKT, live_logp_BK, beam_BK = _pick(best_BK, seq_B2KT, live_logp_B2K, parent_B2K)

    score_B2K = logp_B2K / length_penalty(rules.alpha, rules.offset_B + step + 1)[:, None]
    finished_BKT, finished_score_BK, is_finished_BK = _best_finished(
        search, seq_B2KT, score_B2K, ends_B2K
    )
    return _Search(
        step=step + 1,
        live_logp_BK=live_logp_BK,
        live_BKT=live_BKT,
        finished_score_BK=finished_score_BK,
        finished_BKT=finished_BKT,
        is_finished_BK=is_finished_BK,
        cache=rules.cache_of.reorder(new_cache, beam_BK, rules.cache_axis, rules.prefilled),
    )


def _searched(rules: _Rules, search: _Search, stages: Sequence[int]) -> _Search:
    """Runs a loop for each stage, whose arrays have one shape; without stages one loop."""
    advance = functools.partial(_advance, rules)
    if not stages:
        return lax.while_loop(functools.partial(_continues, rules), advance, search)
    for length in stages:

        def within(search: _Search, length: int = length) -> Array:
            return (search.step < length) & _continues(rules, search)

        search = search._replace(cache=rules.cache_of.grow(search.cache, length))
        search = lax.while_loop(within, advance, search)
    return search


def beam_search(
    inputs: ArrayLike,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 4,
    alpha: float = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int = -1,
    min_log_prob: float = NEG_INF,
    decode_rng: Array | None = None,
    cache_offset: int = 0,
    initial_index: ArrayLike | None = None,
    *,
    constrain: Constrain | None = None,
    cache_of: CacheOfBeams = COPIED,
    stages: Sequence[int] = (),
) -> tuple[Array, Array]:
    """Returns the `num_decodes` best sequences of every row: T5X's `decode_fn`, with its names.

    Args:
      inputs: int [B, T]; nonzero tokens from column 1 on are a prefix that is forced (score 0).
        Column 0 is the start token.
      cache: nested mapping of arrays with B rows, expanded to B*K by leaf name (`expand_cache`).
      tokens_to_logits: DecodingState -> (logits [B*K, V], new cache).
      num_decodes: K. 1 is greedy search. alpha: exponent of the length penalty, >= 0.
      max_decode_len: T; default the width of `inputs`. max_decode_step: if > 0, the most steps.
      min_log_prob: the loop ends as soon as the best live log-probability of every row is below.
      decode_rng: not used. cache_offset: the batch axis of cache leaves (1 if layers are before).
      initial_index: int [B], if the cache already holds the prefix: its length in each row. The
        search then starts from the last token of the prefix, and lengths count the prefix.
      constrain: what may not come next (`m4.eval.decoding.methods.constraints`).
      cache_of: how beams keep what they have computed.
      stages: lengths of the cache, ascending, up to T: it grows with the sequences. (): it has its
        length. Attention and reordering read no more than there is.

    Returns:
      (int32 [B, K, T], float32 [B, K]): sequences without the start token, EOS kept and zeros
      after it; scores ascending, the best last. Slots that no hypothesis filled are zeros with
      score -1e7. A row without any finished hypothesis gives its live ones and their
      log-probabilities, not normalised by length.
    """
    del decode_rng
    assert alpha >= 0, f"{alpha}: the stopping rule needs a penalty that grows with length"
    prompts_BT = inputs = jnp.asarray(inputs, jnp.int32)
    length, prefilled = max_decode_len or inputs.shape[1], initial_index is not None
    offset_B = start_B = jnp.zeros((inputs.shape[0],), jnp.int32)
    if initial_index is not None:
        offset_B = jnp.asarray(initial_index, jnp.int32)
        start_B = jnp.take_along_axis(prompts_BT, offset_B[:, None], axis=1)[:, 0]
        inputs = jnp.zeros_like(prompts_BT)  # nothing is left to force, as past its end
    forced_BT = jnp.pad(inputs, ((0, 0), (0, max(0, length + 1 - inputs.shape[1]))))
    rules = _Rules(
        tokens_to_logits, eos_id, alpha, length, max_decode_step, min_log_prob, cache_offset,
        prefilled, offset_B, forced_BT, constrain, cache_of,
    )  # fmt: skip
    cache = cache_of.expand(cache, num_decodes, cache_offset, prefilled)
    begin = _beginning(start_B, num_decodes, length, cache)
    seq_BKT, score_BK = _result(_searched(rules, begin, stages))
    return (_prepend(prompts_BT, offset_B, seq_BKT) if prefilled else seq_BKT), score_BK


def _result(end: _Search) -> tuple[Array, Array]:
    """Returns finished hypotheses and their scores; of a row without any the live ones."""
    any_B1 = jnp.any(end.is_finished_BK, axis=1, keepdims=True)
    score_BK = jnp.where(any_B1, end.finished_score_BK, end.live_logp_BK)
    return jnp.where(any_B1[:, :, None], end.finished_BKT, end.live_BKT)[:, :, 1:], score_BK


def _prepend(prompts_BT: Array, offset_B: Array, seq_BKT: Array) -> Array:
    """Puts the first `offset_B` tokens after the start token of the prompts before `seq_BKT`."""
    batch, beams, length = seq_BKT.shape
    both = jnp.concatenate(
        [
            jnp.broadcast_to(prompts_BT[:, None, 1:], (batch, beams, prompts_BT.shape[1] - 1)),
            seq_BKT,
        ],
        axis=2,
    )
    t_T = jnp.arange(length)[None]
    shift_B = prompts_BT.shape[1] - 1 - offset_B  # unused columns of the prompt
    source_BT = jnp.where(t_T < offset_B[:, None], t_T, t_T + shift_B[:, None])
    return jnp.take_along_axis(both, source_BT[:, None, :], axis=2)

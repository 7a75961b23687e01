"""Beam search as one `lax.while_loop`, with the semantics of T5X's `decoding.beam_search`.

Axes: B sentences (batch), K beams, T target length, V vocabulary; a trailing 2K or 3K is a set of
candidates. Live beams are hypotheses that have not ended, finished beams are those with an EOS.
Both sets are kept in ascending order, so that the best of each is at [:, -1].

Each step takes the 2K best of the K*V continuations: those with EOS compete for the finished set by
score = log-probability / length_penalty(alpha, tokens incl. EOS); the K best others stay live. The
loop ends when no live beam of any row can still beat the worst of K finished ones. Until then, a
row that is done is searched on, but its finished set cannot change, so rows do not influence each
other.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from m4.parallel.mesh import split_axes

NEG_INF = -1.0e7  # "minus infinity" that survives float32 sums; part of T5X's contract
# Cache leaves without a beam axis: what depends only on the source is shared by a sentence's beams.
_BEAMLESS = (
    "cached_bias", "position_embedder_index", "cache_index", "cross_key", "cross_value"
)  # fmt: skip
# Size of a chunk of `top_k`.
_LARGEST_CHUNK, _SMALLEST_CHUNK = 128, 16


class DecodingState(NamedTuple):
    """The state that a model may look at when it scores the next token."""

    cur_index: Array  # scalar int32, number of steps done
    sequences: Array  # int32 [B*K, T+1], live hypotheses; column 0 is the start token 0
    cur_token: Array  # int32 [B*K, 1], the last token of each
    cache: Mapping[str, Any]  # arrays with leading axis B*K, except the leaves without beams


TokensToLogits = Callable[[DecodingState], tuple[Array, Mapping[str, Any]]]


class _Search(NamedTuple):
    step: Array  # scalar int32
    live_logp_BK: Array
    live_BKT: Array  # T+1 columns, like all sequences inside the search
    finished_score_BK: Array
    finished_BKT: Array
    is_finished_BK: Array  # False marks an empty slot of the finished set
    cache: Any


def length_penalty(alpha: float, length: Array | int) -> Array:
    """Returns ((5 + length) / 6) ** alpha, which divides a log-probability (GNMT, equation 14)."""
    return jnp.power((5.0 + jnp.asarray(length, jnp.float32)) / 6.0, alpha)


def _leaf_name(path: tuple[Any, ...]) -> str:
    return str(getattr(path[-1], "key", path[-1]))


def expand_cache(cache: Any, beams: int) -> Any:
    """Repeats the rows of every leaf `beams` times, adjacent: [B, ...] -> [B*K, ...].

    Beams share keys and values of sources that were filled before the first step. Those next to a
    `cache_index`, as in T5X's models, are filled in the first step, for each beam.
    """
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    unfilled = {path[:-1] for path, _ in leaves if _leaf_name(path) == "cache_index"}

    def expand(path: tuple[Any, ...], x: Array) -> Array:
        name = _leaf_name(path)
        late = name.startswith("cross_") and path[:-1] in unfilled
        return x if name in _BEAMLESS and not late else jnp.repeat(x, beams, axis=0)

    return jax.tree_util.tree_map_with_path(expand, cache)


def reorder_cache(cache: Any, beam_BK: Array) -> Any:
    """Gives new beam k of a sentence the state of its old beam `beam_BK[b, k]`; leaves [B*K, ...].

    It happens inside each sentence, so that it stays local when B is sharded.
    """
    batch, beams = beam_BK.shape
    if beams == 1:
        return cache

    def gathered(old_BK: Array, beam_BK: Array) -> Array:
        # Indices from top-k need no check.
        return jnp.take_along_axis(old_BK, beam_BK, axis=1, mode="promise_in_bounds")

    def selected(old_BK: Array, beam_BK: Array) -> Array:
        # On a CPU, the loop over a row's numbers is vectorised and fused with the write that
        # follows; a gather would look up the index of every number.
        new_BK = jnp.broadcast_to(old_BK[:, :1], old_BK.shape)
        for beam in range(1, beams):
            new_BK = jnp.where(beam_BK == beam, old_BK[:, beam : beam + 1], new_BK)
        return new_BK

    def reorder(path: tuple[Any, ...], x: Array) -> Array:
        if _leaf_name(path) in _BEAMLESS:
            return x
        old_BK = x.reshape(batch, beams, *x.shape[1:])
        index_BK = beam_BK.reshape(batch, beams, *(1,) * (x.ndim - 1))
        new_BK = lax.platform_dependent(old_BK, index_BK, cpu=selected, default=gathered)
        return new_BK.reshape(x.shape)

    return jax.tree_util.tree_map_with_path(reorder, cache)


def grow_cache(cache: Any, length: int) -> Any:
    """Extends keys and values [rows, N, R, D] to `length` positions, with zeros."""

    def grow(path: tuple[Any, ...], x: Array) -> Array:
        if _leaf_name(path) not in ("cached_key", "cached_value"):
            return x
        return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)])

    return jax.tree_util.tree_map_with_path(grow, cache)


def top_k(x_BN: Array, k: int) -> tuple[Array, Array]:
    """Returns values and indices [B, k], the largest first, ties by the lowest index.

    Over a mesh, each device takes its local rows. Left to itself, the partitioner may send all
    rows, B * K * V numbers, to every device at every step (it does on CPU, jax 0.10.2).
    """
    mesh = jax.sharding.get_abstract_mesh()
    over = split_axes(mesh, "batch")
    local = functools.partial(_on_a_device, k=k)
    if not over or x_BN.shape[0] % math.prod(mesh.shape[axis] for axis in over):
        return local(x_BN)
    rows = PartitionSpec(over)
    return jax.shard_map(local, in_specs=rows, out_specs=rows, axis_names={*over})(x_BN)


def _on_a_device(x_BN: Array, k: int) -> tuple[Array, Array]:
    def whole(x_BN: Array) -> tuple[Array, Array]:
        value_Bk, index_Bk = lax.top_k(x_BN, k)
        return value_Bk, index_Bk

    N = x_BN.shape[1]
    chunk = math.gcd(N, _LARGEST_CHUNK)
    if chunk < _SMALLEST_CHUNK or 2 * k * chunk > N:
        return whole(x_BN)
    by_chunks = functools.partial(_by_chunks, k=k, chunk=chunk)
    return lax.platform_dependent(x_BN, cpu=by_chunks, default=whole)


def _by_chunks(x_BN: Array, k: int, chunk: int) -> tuple[Array, Array]:
    """Returns the top k from k chunks of each row, those with the largest maxima.

    Any number of another chunk has the maxima of these k chunks before it: they are larger, or
    equal with a lower index. CPUs find maxima in one quick pass, while `lax.top_k` keeps a heap.
    """
    x_BCc = x_BN.reshape(x_BN.shape[0], -1, chunk)
    _, chunk_Bk = lax.top_k(jnp.max(x_BCc, axis=2), k)
    chunk_Bk = jnp.sort(chunk_Bk, axis=1)  # so that among equals the lowest index stays the first
    kept_Bkc = jnp.take_along_axis(x_BCc, chunk_Bk[:, :, None], axis=1)
    value_Bk, place_Bk = lax.top_k(kept_Bkc.reshape(len(x_BN), -1), k)
    of_Bk = jnp.take_along_axis(chunk_Bk, place_Bk // chunk, axis=1)
    return value_Bk, of_Bk * chunk + place_Bk % chunk


def _pick(index_BK: Array, *arrays: Array) -> tuple[Array, ...]:
    """Returns the entries `index_BK` along axis 1 of arrays [B, N] or [B, N, T]."""
    return tuple(
        jnp.take_along_axis(x, index_BK.reshape(index_BK.shape + (1,) * (x.ndim - 2)), axis=1)
        for x in arrays
    )


def _best(score_BN: Array, beams: int) -> Array:
    """Returns indices of the highest scores, ascending; in ties the lower index is best."""
    return jnp.flip(top_k(score_BN, beams)[1], axis=1)


def _continuations(
    logp_BKV: Array, search: _Search, forced_B1: Array
) -> tuple[Array, Array, Array]:
    """Returns log-probabilities, tokens and parents of the best continuations, [B, 2K].

    There are 2K, because K of them may end here and K must live on. All have a forced token (not
    0).
    """
    batch, beams, vocab = logp_BKV.shape
    logp_BKV = logp_BKV + search.live_logp_BK[:, :, None]
    logp_B2K, flat_B2K = top_k(logp_BKV.reshape(batch, -1), 2 * beams)
    parent_B2K, token_B2K = flat_B2K // vocab, flat_B2K % vocab
    # Inside a forced prefix, only one candidate of a row is live: equal beams would stay equal.
    only_first_B2K = jnp.where(jnp.arange(2 * beams) == 0, 0.0, NEG_INF)[None]
    logp_B2K = jnp.where(forced_B1 == 0, logp_B2K, only_first_B2K)
    token_B2K = jnp.where(forced_B1 == 0, token_B2K, forced_B1)
    return logp_B2K, token_B2K, parent_B2K


def constrained(
    logp_BKV: Array,
    sequences_BKT: Array,
    step: Array,
    eos_id: int,
    min_length: int = 0,
    no_repeat_ngram: int = 0,
) -> Array:
    """Returns the next token's log-probabilities, with -inf for forbidden tokens.

    The others are not renormalised, so a translation's score stays the model's. A token at -inf is
    never chosen: empty slots of the search have `NEG_INF`, which is better.

    Args:
      sequences_BKT: int32 with T+1 columns: the start token, then `step` tokens.
      min_length: Minimum number of tokens before EOS.
      no_repeat_ngram: Size n of n-grams that may not repeat in a hypothesis; 0 allows all.
    """
    if min_length:
        early_V = (jnp.arange(logp_BKV.shape[-1]) == eos_id) & (step < min_length)
        logp_BKV = jnp.where(early_V, -jnp.inf, logp_BKV)
    if no_repeat_ngram:
        # Columns at which an n-gram ends that begins with the last n - 1 tokens.
        column_T = jnp.arange(sequences_BKT.shape[-1])
        ends_BKT = jnp.broadcast_to(
            (no_repeat_ngram <= column_T) & (column_T <= step), sequences_BKT.shape
        )
        for back in range(1, min(no_repeat_ngram, len(column_T))):
            last_BK1 = lax.dynamic_index_in_dim(sequences_BKT, step + 1 - back, axis=2)
            ends_BKT &= jnp.roll(sequences_BKT, back, axis=2) == last_BK1
        bound_BKT = jnp.where(ends_BKT, -jnp.inf, jnp.inf)
        lower = jax.vmap(jax.vmap(lambda logp_V, token_T, x_T: logp_V.at[token_T].min(x_T)))
        logp_BKV = lower(logp_BKV, sequences_BKT, bound_BKT)
    return logp_BKV


def next_logp(
    step: Array, sequences_BKT: Array, cache: Any, tokens_to_logits: TokensToLogits
) -> tuple[Array, Any]:
    """Returns log-probabilities of each hypothesis' next token [B, K, V], and the cache with it."""
    batch, copies = sequences_BKT.shape[:2]
    token_BK = lax.dynamic_index_in_dim(sequences_BKT, step, axis=2, keepdims=False)
    sequences, last = sequences_BKT.reshape(batch * copies, -1), token_BK.reshape(-1, 1)
    logits, cache = tokens_to_logits(DecodingState(step, sequences, last, cache))
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return logp.reshape(batch, copies, -1), cache


def beam_search(
    inputs: ArrayLike,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int = 4,
    alpha: float = 0.6,
    *,
    stages: Sequence[int] = (),
    min_length: int = 0,
    no_repeat_ngram: int = 0,
) -> tuple[Array, Array]:
    """Returns the `num_decodes` best sequences of every row, like T5X's `decode_fn`.

    Args:
      inputs: int [B, T]. Column 0 is the start token, 0; nonzero tokens after it are a forced
        prefix (score 0).
      cache: Nested mapping of arrays with B rows, expanded to B*K by leaf name (`expand_cache`).
      num_decodes: Number of beams, K; 1 is greedy search.
      stages: Ascending lengths of the cache, all even except the last, T. The cache grows with the
        sequences, so that attention and reordering read only what is filled. Defaults to (T,).
      min_length, no_repeat_ngram: See `constrained`. A forced prefix may break both.

    Returns:
      (int32 [B, K, T], float32 [B, K]): sequences without the start token, with EOS and zeros
      after it; ascending scores, the best last. Slots without a hypothesis are zeros with score
      -1e7. A row without a finished hypothesis gives its live ones and their log-probabilities,
      not normalised by length.
    """
    assert alpha >= 0, f"{alpha}: the stopping rule needs a penalty that grows with length"
    inputs_BT = jnp.asarray(inputs, jnp.int32)
    (batch, length), beams = inputs_BT.shape, num_decodes
    # Column t is the forced token of position t, or 0.
    forced_BT = jnp.pad(inputs_BT, ((0, 0), (0, 1)))
    # T5X counts the start token here, so the bound on a live score is the penalty of length + 1.
    largest_penalty = length_penalty(alpha, length + 1)

    def continues(search: _Search) -> Array:
        best_live_B = search.live_logp_BK[:, -1] / largest_penalty
        worst_B = jnp.min(search.finished_score_BK, axis=1)
        full_B = jnp.all(search.is_finished_BK, axis=1)
        done = jnp.all(jnp.where(full_B, worst_B, NEG_INF) > best_live_B)
        return ~(done | (search.step >= length))

    def advance(search: _Search) -> _Search:
        step = search.step
        logp_BKV, new_cache = next_logp(step, search.live_BKT, search.cache, tokens_to_logits)
        forced_B1 = lax.dynamic_slice_in_dim(forced_BT, step + 1, 1, axis=1)
        logp_BKV = constrained(logp_BKV, search.live_BKT, step, eos_id, min_length, no_repeat_ngram)
        logp_B2K, token_B2K, parent_B2K = _continuations(logp_BKV, search, forced_B1)
        (seq_B2KT,) = _pick(parent_B2K, search.live_BKT)
        seq_B2KT = lax.dynamic_update_slice_in_dim(seq_B2KT, token_B2K[:, :, None], step + 1, 2)
        ends_B2K = token_B2K == eos_id

        live_logp_B2K = logp_B2K + jnp.where(ends_B2K, NEG_INF, 0.0)
        best_BK = _best(live_logp_B2K, beams)
        live_BKT, live_logp_BK, beam_BK = _pick(best_BK, seq_B2KT, live_logp_B2K, parent_B2K)

        # The K best of the finished and of the candidates that end.
        penalty_B = length_penalty(alpha, jnp.full((batch,), step + 1))
        score_B2K = logp_B2K / penalty_B[:, None] + jnp.where(ends_B2K, 0.0, NEG_INF)
        score_B3K = jnp.concatenate([search.finished_score_BK, score_B2K], axis=1)
        finished_BKT, finished_score_BK, is_finished_BK = _pick(
            _best(score_B3K, beams),
            jnp.concatenate([search.finished_BKT, seq_B2KT], axis=1),
            score_B3K,
            jnp.concatenate([search.is_finished_BK, ends_B2K], axis=1),
        )
        cache = reorder_cache(new_cache, beam_BK)
        return _Search(
            step + 1, live_logp_BK, live_BKT, finished_score_BK, finished_BKT, is_finished_BK, cache
        )

    # One live beam per row, with the start token 0; none is finished.
    zeros_BKT = jnp.zeros((batch, beams, length + 1), jnp.int32)
    first_K = jnp.where(jnp.arange(beams) == 0, 0.0, NEG_INF).astype(jnp.float32)
    search = _Search(
        step=jnp.zeros((), jnp.int32),
        live_logp_BK=jnp.broadcast_to(first_K, (batch, beams)),
        live_BKT=zeros_BKT,
        finished_score_BK=jnp.full((batch, beams), NEG_INF, jnp.float32),
        finished_BKT=zeros_BKT,
        is_finished_BK=jnp.zeros((batch, beams), bool),
        cache=expand_cache(cache, beams),
    )
    for stage in stages:  # one loop per stage, whose arrays have one shape

        def within(search: _Search, stage: int = stage) -> Array:
            return (search.step < stage) & continues(search)

        # With two steps per iteration, each writes the beams into the other's buffer; after a
        # single step they would be copied back. An extra last step changes nothing (see above).
        rounds = advance if stage % 2 else lambda search: advance(advance(search))
        search = search._replace(cache=grow_cache(search.cache, stage))
        search = lax.while_loop(within, rounds, search)
    if not stages:
        search = lax.while_loop(continues, advance, search)
    any_B1 = jnp.any(search.is_finished_BK, axis=1, keepdims=True)
    score_BK = jnp.where(any_B1, search.finished_score_BK, search.live_logp_BK)
    found_BKT = jnp.where(any_B1[:, :, None], search.finished_BKT, search.live_BKT)
    return found_BKT[:, :, 1:], score_BK

"""Beam search and its constraints, against tables by hand, plain loops, a search over lists."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from scipy.special import log_softmax

from m4.eval.decoding import beam
from m4.eval.decoding.beam import beam_search, constrained
from m4.eval.decoding.sampling import Sampling, sample
from tests.eval.search_over_lists import Tokens, penalty, search_over_lists

EOS, A, B = 1, 2, 3


def static(table):
    """Returns tokens_to_logits of probabilities table[row][step][token], whatever the history.

    log_softmax leaves the logarithms of probabilities as they are, so scores can be read off.
    """
    with np.errstate(divide="ignore"):
        logp = np.maximum(np.log(np.asarray(table, np.float32)), -1e9)

    def tokens_to_logits(state):
        rows = np.arange(state.cur_token.shape[0]) // (state.cur_token.shape[0] // len(logp))
        step = jnp.minimum(state.cur_index, logp.shape[1] - 1)
        return jnp.asarray(logp)[rows, step], state.cache

    return tokens_to_logits


def zeros(rows, length):
    return np.zeros((rows, length), np.int32)


def at_once(inputs, cache, model, beams, alpha=0.6, **options):
    """Runs the search as one program, which compiles quicker than its operations."""
    run = jax.jit(lambda x, kept: beam.beam_search(x, kept, model, EOS, beams, alpha, **options))
    return jax.device_get(run(inputs, cache))


def markov(state):
    """Returns a chain with time in the cache: p(next | last token, step), tokens pad, EOS, A, B.

    step 0:            A .6   B .4
    step 1, after A:   A .4   B .35  EOS .25       after B:  A .05  B .05  EOS .9
    step 2:            EOS 1
    """
    tables = np.full((3, 4, 4), 1e-9)
    tables[0, 0, [A, B]] = 0.6, 0.4
    tables[1, A, [A, B, EOS]] = 0.4, 0.35, 0.25
    tables[1, B, [A, B, EOS]] = 0.05, 0.05, 0.9
    tables[2, :, EOS] = 1
    steps = state.cache["cur_iter"]
    logits = jnp.log(jnp.asarray(tables, jnp.float32))[
        jnp.minimum(steps, 2)[:, 0], state.cur_token[:, 0]
    ]
    return logits, {"cur_iter": steps + 1}


@pytest.mark.parametrize(
    ("beams", "alpha", "sequences", "scores"),
    [
        # K = 2. Step 0 leaves A .6 and B .4. Of step 1's eight continuations the four best are
        # B EOS .36, A A .24, A B .21, A EOS .15: two finish, two live. Step 2 ends those two:
        # A A EOS .24 replaces A EOS. Best last.
        (2, 0.0, [[A, A, EOS, 0], [B, EOS, 0, 0]], [math.log(0.24), math.log(0.36)]),
        # The same divided by ((5 + 3) / 6)^.6 and ((5 + 2) / 6)^.6.
        (
            2,
            0.6,
            [[A, A, EOS, 0], [B, EOS, 0, 0]],
            [math.log(0.24) / (8 / 6) ** 0.6, math.log(0.36) / (7 / 6) ** 0.6],
        ),
        # K = 1 is greedy: B is lost at step 0.
        (1, 0.0, [[A, A, EOS, 0]], [math.log(0.24)]),
    ],
)
def test_markov_chain(beams, alpha, sequences, scores):
    got, got_scores = at_once(zeros(2, 4), {"cur_iter": zeros(2, 1)}, markov, beams, alpha)
    np.testing.assert_array_equal(got, [sequences] * 2)
    np.testing.assert_allclose(got_scores, [scores] * 2, atol=1e-5)


@pytest.mark.parametrize(
    ("p_eos", "steps"),
    [
        # K = 1, T = 10, alpha .6. After step 1 the finished one scores log p_eos (penalty 1), and
        # the live one at best log(1 - p_eos) / (16/6)^.6 = log(1 - p_eos) / 1.801.
        # .9: -.105 > log .1 / 1.801 = -1.279: done after one step.
        (0.9, 1),
        # .3: -1.204 against log .7 / 1.801 = -.198: continue. Second finished: log(.7 * .3) /
        # (7/6)^.6 = -1.423, no better. Live after n steps: n * -.3567 / 1.801 = -.198 n, below
        # -1.204 first at n = 7.
        (0.3, 7),
        # .05: -2.996 at first; then log(.95^(n-1) * .05) / ((5 + n) / 6)^.6 improves up to n = 10;
        # the live one is at -.0513 n / 1.801: never beaten, the length ends it.
        (0.05, 10),
    ],
)
def test_stops_when_no_live_beam_can_win(p_eos, steps):
    calls = []
    model = static([[[0, p_eos, 1 - p_eos, 0]]])

    def count(state):
        calls.append(state)
        return model(state)

    with jax.disable_jit():
        beam.beam_search(zeros(1, 10), {}, count, EOS, 1, 0.6)
    assert len(calls) == steps


def test_cache_rule_by_leaf_name():
    # Two sentences with two beams each; sentence 0 keeps beam 1 twice, sentence 1 swaps.
    cache = {
        "layer": {
            "cached_key": jnp.asarray([[10.0], [20.0]]), "cross": {"cross_key": jnp.ones((2, 1))},
            "cache_index": jnp.asarray(3), "cached_bias": jnp.zeros((1, 5)),
            "t5x": {"cross_key": jnp.ones((2, 1)), "cache_index": jnp.asarray(0)},
        }
    }  # fmt: skip
    wide = beam.expand_cache(cache, 2)["layer"]
    np.testing.assert_array_equal(wide["cached_key"], [[10], [10], [20], [20]])
    assert [len(wide[name]["cross_key"]) for name in ("cross", "t5x")] == [2, 4]  # 2: shared
    assert (wide["cache_index"].shape, wide["cached_bias"].shape) == ((), (1, 5))

    wide["cached_key"] = jnp.asarray([[10.0], [11.0], [20.0], [21.0]])
    new = beam.reorder_cache({"layer": wide}, jnp.asarray([[1, 1], [1, 0]]))["layer"]
    np.testing.assert_array_equal(new["cached_key"], [[11], [11], [21], [20]])
    assert new["cross"]["cross_key"] is wide["cross"]["cross_key"]
    assert new["cache_index"] is wide["cache_index"]


def test_reorders_as_a_gather_does():
    rng = np.random.default_rng(0)
    key = rng.normal(size=(3 * 4, 2, 5, 7)).astype(np.float32)
    beam_BK = rng.integers(0, 4, (3, 4))
    moved = beam.reorder_cache({"cached_key": jnp.asarray(key)}, jnp.asarray(beam_BK))
    flat = (beam_BK + np.arange(3)[:, None] * 4).ravel()
    np.testing.assert_array_equal(moved["cached_key"], key[flat])


def second_order(table, state):
    """Returns logits from the last two tokens; the first of them is in the cache of its beam."""
    last = state.cur_token[:, 0]
    rows = jnp.arange(last.shape[0]) // (last.shape[0] // table.shape[0])
    return table[rows, state.cache["previous"][:, 0], last], {"previous": state.cur_token}


@partial(jax.jit, static_argnames=("beams", "alpha"))
def search(table, inputs, beams, alpha):
    previous = jnp.zeros((table.shape[0], 1), jnp.int32)
    return beam.beam_search(
        inputs, {"previous": previous}, partial(second_order, table), EOS, beams, alpha
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 9, 6), (2, 8, 7), (4, 9, 5)]),  # K, V >= 2K, T
    alpha=st.sampled_from([0.0, 0.6]),
    likely_end=st.sampled_from([-30.0, -2.0, 0.0, 2.0]),  # the first: no row ends
    prefixes=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_equals_search_over_lists(seed, shape, alpha, likely_end, prefixes):
    beams, vocab, length = shape
    rng = np.random.default_rng(seed)
    table = rng.normal(0, 2, (2, vocab, vocab, vocab)).astype(np.float32)
    table[..., EOS] += likely_end
    logp = log_softmax(table.astype(np.float64), axis=-1)
    inputs = zeros(2, length)
    expected = []
    for row, size in enumerate(prefixes):
        prefix = rng.integers(2, vocab, size)
        inputs[row, 1 : 1 + size] = prefix

        def score(tokens, row=row):
            before, last = (0, 0, *tokens)[-2:]
            return logp[row, before, last].tolist()

        expected.append(search_over_lists(score, prefix.tolist(), beams, alpha, length))
    assume(min(gap for _, _, gap in expected) > 1e-4)  # float ties have no right answer
    sequences, scores = jax.device_get(search(table, inputs, beams, alpha))
    for row, (best_first, best_scores, _) in enumerate(expected):
        np.testing.assert_array_equal(sequences[row, ::-1], best_first)
        np.testing.assert_allclose(scores[row, ::-1], best_scores, atol=1e-5, rtol=1e-5)
        # Law: a row does not depend on its neighbours.
        alone, alone_scores = jax.device_get(
            search(np.stack([table[row]] * 2), np.stack([inputs[row]] * 2), beams, alpha)
        )
        np.testing.assert_array_equal(alone[0], sequences[row])
        np.testing.assert_allclose(alone_scores[0], scores[row], atol=1e-6)


SHAPES = [
    (3, 8192, 2),
    (2, 4 * 3072, 8),
    (2, 400, 8),  # chunks of 16
    (2, 997, 8),  # a prime: in one stage
    (2, 64, 64),
]


@pytest.mark.parametrize("few", [None, 3, 1], ids=["different", "many ties", "all equal"])
@pytest.mark.parametrize(("rows", "numbers", "k"), SHAPES)
def test_the_k_largest_are_those_of_lax(rows, numbers, k, few):
    rng = np.random.default_rng(numbers)
    x_BN = rng.normal(size=(rows, numbers))
    if few is not None:
        x_BN = rng.integers(few, size=(rows, numbers))
    # Ended and dead hypotheses.
    x_BN = np.where(rng.random((rows, numbers)) < 0.1, -np.inf, x_BN).astype(np.float32)
    x_BN[0, : numbers // 2] = -1e7
    for got, expected in zip(
        jax.jit(beam.top_k, static_argnums=1)(x_BN, k), lax.top_k(x_BN, k), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_cpus_sort_no_whole_row():
    text = jax.jit(lambda x_BN: beam.top_k(x_BN, 4)).lower(jnp.zeros((2, 1024))).as_text()
    assert "tensor<2x8x128xf32>" in text


FEW, LENGTH = 6, 7  # tokens of a vocabulary, of a hypothesis


def banned(said: Tokens, min_length: int, ngram: int) -> set[int]:
    """Returns the tokens that may not follow `said`."""
    found = {EOS} if len(said) < min_length else set()
    for token in range(FEW) if ngram else ():
        grams = [(*said, token)[i : i + ngram] for i in range(len(said) - ngram + 2)]
        if grams and grams[-1] in grams[:-1]:
            found.add(token)
    return found


def chain(seed: int) -> tuple[Any, Any]:
    """Returns a model whose next token depends on the last one and the step, and its table.

    The table is float64 log-probabilities [T, V, V]; the end is likely, and token 0 never comes.
    """
    shares = np.random.default_rng(seed).dirichlet(np.full(FEW, 0.4), (LENGTH, FEW)) + 0.02
    shares[..., 0], shares[..., EOS] = 0, 0.5
    with np.errstate(divide="ignore"):
        logp_TVV = np.maximum(np.log(shares / shares.sum(2, keepdims=True)), -1e9)

    def model(state: Any) -> Any:
        return jnp.asarray(logp_TVV, jnp.float32)[state.cur_index, state.cur_token[:, 0]], {}

    return model, logp_TVV


@pytest.mark.parametrize(
    ("min_length", "ngram"),
    [(0, 1), (0, 2), (3, 3), (4, 0), (2, 2), (0, 7), (0, 8), (0, 2**31 - 1)],
)
def test_one_step_is_that_of_plain_loops(min_length: int, ngram: int) -> None:
    rng = np.random.default_rng(0)
    tokens_BKT = rng.integers(2, 4 if ngram > 2 else FEW, (3, 2, LENGTH))
    tokens_BKT[0, 0] = 5  # its n-grams overlap
    apply = jax.jit(partial(constrained, eos_id=EOS, min_length=min_length, no_repeat_ngram=ngram))
    logp_BKV = np.log(rng.dirichlet(np.ones(FEW), (3, 2))).astype(np.float32)
    for step in range(LENGTH):
        sequences_BKT = np.zeros((3, 2, LENGTH + 1), np.int32)
        sequences_BKT[:, :, 1 : step + 1] = tokens_BKT[:, :, :step]
        got_BKV = np.asarray(apply(logp_BKV, sequences_BKT, step))
        for b, k in np.ndindex(3, 2):
            no = banned(tuple(tokens_BKT[b, k, :step].tolist()), min_length, ngram)
            wanted = [-math.inf if v in no else logp_BKV[b, k, v] for v in range(FEW)]
            assert got_BKV[b, k].tolist() == wanted, (step, b, k)


def test_without_constraints_nothing_is_compiled_for_them() -> None:
    logp_BKV: Any = object()
    assert constrained(logp_BKV, logp_BKV, logp_BKV, EOS) is logp_BKV


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("min_length", "ngram", "prefix"), [(3, 0, []), (0, 2, []), (4, 1, [3]), (2, 2, [4, 4])]
)
def test_a_search_is_that_over_lists_of_what_is_allowed(
    beams: int, min_length: int, ngram: int, prefix: list[int]
) -> None:
    model, logp_TVV = chain(len(prefix) + ngram)

    def allowed(said: Tokens) -> list[float]:
        no = banned(said, min_length, ngram) | {0}
        row = logp_TVV[len(said), said[-1] if said else 0].tolist()
        return [-math.inf if v in no else row[v] for v in range(FEW)]

    inputs_BT = np.zeros((1, LENGTH), np.int32)
    inputs_BT[0, 1 : 1 + len(prefix)] = prefix
    search = partial(beam_search, min_length=min_length, no_repeat_ngram=ngram)
    run = jax.jit(lambda inputs_BT: search(inputs_BT, {}, model, EOS, beams, 0.6))
    got, scores = jax.device_get(run(inputs_BT))
    best_first, wanted, gap = search_over_lists(allowed, prefix, beams, 0.6, LENGTH)
    assert gap > 1e-5
    assert got[0, ::-1].tolist() == best_first
    np.testing.assert_allclose(scores[0, ::-1], wanted, rtol=1e-5)
    assert len({*map(tuple, best_first)}) == beams


def test_samples_come_as_often_as_what_is_allowed() -> None:
    # All sequences of at most 4 tokens, of which 2 come before EOS and none comes twice.
    length, min_length, ngram = 4, 2, 1
    model, logp_TVV = chain(5)
    share: dict[Tokens, float] = {}
    score: dict[Tokens, float] = {}

    def follow(said: Tokens, p: float, logp: float) -> None:
        if len(said) == length or EOS in said:
            share[said], score[said] = p, logp / penalty(0.6, len(said))
            return
        row_V = logp_TVV[len(said), said[-1] if said else 0]
        some = [v for v in range(1, FEW) if v not in banned(said, min_length, ngram)]
        whole = np.exp(row_V[some]).sum()
        for v in some:
            follow((*said, v), p * np.exp(row_V[v]) / whole, logp + row_V[v])

    follow((), 1.0, 0.0)
    # After two of tokens 2 to 5 (4 * 3) the end, or one of 2 others and then the end or the last.
    assert len(share) == 12 * (1 + 2 * 2)
    inputs_BT, draws = jnp.zeros((1, length), jnp.int32), 4000
    draw = partial(sample, min_length=min_length, no_repeat_ngram=ngram)
    run = jax.jit(lambda name_B: draw(inputs_BT, name_B, {}, model, EOS, draws, 0.6, Sampling()))
    tokens_BKT, score_BK = jax.device_get(run(np.array([7], np.uint32)))
    found = [tuple(v for v in each if v) for each in tokens_BKT[0].tolist()]
    assert {*found} <= {*share}
    for said, p in share.items():  # five standard deviations of a share, and one sample
        assert abs(found.count(said) / draws - p) < 5 * math.sqrt(p / draws) + 1 / draws
    np.testing.assert_allclose(score_BK[0], [score[said] for said in found], rtol=1e-5)

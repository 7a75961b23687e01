"""Beam search against tables worked out by hand and against a search over plain Python lists."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from scipy.special import log_softmax

from m4.eval.decoding import beam
from tests.eval.search_over_lists import search_over_lists

EOS, A, B = 1, 2, 3


def static(table):
    """tokens_to_logits from probabilities table[row][step][token] that ignore the history.

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
    """The search as one program, which compiles quicker than its operations; arrays of numpy."""
    run = jax.jit(lambda x, kept: beam.beam_search(x, kept, model, EOS, beams, alpha, **options))
    return jax.device_get(run(inputs, cache))


def markov(state):
    """A chain with time in the cache: p(next | last token, step), tokens pad, EOS, A, B.

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


def test_rows_with_and_without_a_finished_hypothesis():
    # Row 0 ends at step 0 with probability 1, and no other hypothesis can end: its second slot
    # stays empty (zeros, -1e7). Row 1 never ends: live, not normalised, two steps of B .6 and .65.
    table = [[[0, 1, 0, 0], [0, 0, 1, 0]], [[0, 0, 0.4, 0.6], [0, 0, 0.35, 0.65]]]
    got, scores = at_once(zeros(2, 2), {}, static(table), 2, alpha=0.6)
    np.testing.assert_array_equal(got, [[[0, 0], [EOS, 0]], [[A, B], [B, B]]])
    live = [math.log(0.4 * 0.65), math.log(0.6 * 0.65)]
    np.testing.assert_allclose(scores, [[-1e7, 0], live], atol=1e-5)


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
            "cached_key": jnp.asarray([[10.0], [20.0]]),
            "cross_key": jnp.asarray([[1.0], [2.0]]),
            "cache_index": jnp.asarray(3),
            "cached_bias": jnp.zeros((1, 5)),
        }
    }
    wide = beam.expand_cache(cache, 2)["layer"]
    np.testing.assert_array_equal(wide["cached_key"], [[10], [10], [20], [20]])
    np.testing.assert_array_equal(wide["cross_key"], [[1], [1], [2], [2]])
    assert wide["cache_index"].shape == ()
    assert wide["cached_bias"].shape == (1, 5)

    wide["cached_key"] = jnp.asarray([[10.0], [11.0], [20.0], [21.0]])
    new = beam.reorder_cache({"layer": wide}, jnp.asarray([[1, 1], [1, 0]]))["layer"]
    np.testing.assert_array_equal(new["cached_key"], [[11], [11], [21], [20]])
    assert new["cross_key"] is wide["cross_key"]
    assert new["cache_index"] is wide["cache_index"]


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


@settings(deadline=None, max_examples=40)
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

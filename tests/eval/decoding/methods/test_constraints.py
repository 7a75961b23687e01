"""Constraints of translations: against loops over lists, in one step and in a whole search."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.eval.decoding.beam import beam_search
from m4.eval.decoding.methods.constraints import NEG_INF, constraints
from tests.eval.search_over_lists import Tokens, search_over_lists

EOS, VOCAB, LENGTH = 1, 6, 7


def banned(said: Tokens, forced: list[int], min_length: int, ngram: int) -> set[int]:
    """The tokens that may not follow, in plain words."""
    if len(said) < len(forced):
        return {*range(VOCAB)} - {forced[len(said)]}
    found = {EOS} if len(said) < min_length else set()
    for token in range(VOCAB) if ngram else ():
        grams = [(*said, token)[i : i + ngram] for i in range(len(said) - ngram + 2)]
        if grams and grams[-1] in grams[:-1]:
            found.add(token)
    return found


@pytest.mark.parametrize(
    ("min_length", "ngram", "forced"),
    [(0, 1, False), (0, 2, False), (3, 3, False), (4, 0, True), (2, 2, True), (0, 9, False)],
)
def test_one_step_is_that_of_plain_loops(min_length: int, ngram: int, forced: bool) -> None:
    rng = np.random.default_rng(ngram)
    tokens_BKT = rng.integers(2, VOCAB, (3, 2, LENGTH))
    prefixes = [[2, 3], [], [5, 5, 5]]
    forced_BT = jnp.array([[*one, 0, 0, 0][:3] for one in prefixes]) if forced else None
    constrain = constraints(forced_BT, min_length, ngram)
    assert constrain is not None
    apply = jax.jit(constrain)
    logp_BKV = np.log(rng.dirichlet(np.ones(VOCAB), (3, 2))).astype(np.float32)
    for step in range(LENGTH):
        sequences_BKT = np.zeros((3, 2, LENGTH + 1), np.int32)
        sequences_BKT[:, :, 1 : step + 1] = tokens_BKT[:, :, :step]
        got_BKV = np.asarray(apply(logp_BKV, sequences_BKT, step))
        for b in range(3):
            for k in range(2):
                said = tuple(tokens_BKT[b, k, :step].tolist())
                no = banned(said, prefixes[b] if forced else [], min_length, ngram)
                wanted = [NEG_INF if v in no else logp_BKV[b, k, v] for v in range(VOCAB)]
                assert got_BKV[b, k].tolist() == wanted, (step, said)


def test_without_rules_nothing_is_compiled_for_them() -> None:
    assert constraints() is None


@pytest.mark.parametrize(
    ("min_length", "ngram", "prefix"), [(3, 0, []), (0, 2, []), (4, 1, [3]), (2, 2, [4, 4])]
)
def test_a_search_is_that_over_lists_of_what_is_allowed(
    min_length: int, ngram: int, prefix: list[int]
) -> None:
    # A chain in which the next token depends on the last one and the step; the end is likely.
    rng = np.random.default_rng(len(prefix) + ngram)
    shares = rng.dirichlet(np.full(VOCAB, 0.4), (LENGTH, VOCAB)) + 0.02
    shares[..., 0], shares[..., EOS] = 0, 0.5
    with np.errstate(divide="ignore"):
        logp_TVV = np.maximum(np.log(shares / shares.sum(2, keepdims=True)), -1e9)

    def model(state: Any) -> Any:
        return jnp.asarray(logp_TVV, jnp.float32)[state.cur_index, state.cur_token[:, 0]], {}

    def allowed(said: Tokens) -> list[float]:
        no = banned(said, prefix, min_length, ngram)
        row = logp_TVV[len(said), said[-1] if said else 0].tolist()
        return [-math.inf if v in no or v == 0 else row[v] for v in range(VOCAB)]

    forced_BT = jnp.asarray([prefix], jnp.int32) if prefix else None
    rule = constraints(forced_BT, min_length, ngram)
    search = jax.jit(lambda inputs: beam_search(inputs, {}, model, EOS, 3, 0.6, constrain=rule))
    got, scores = jax.device_get(search(np.zeros((1, LENGTH), np.int32)))
    best_first, wanted, gap = search_over_lists(allowed, [], 3, 0.6, LENGTH)
    assert gap > 1e-5
    assert got[0, ::-1].tolist() == best_first
    np.testing.assert_allclose(scores[0, ::-1], wanted, rtol=1e-5)
    assert len({*map(tuple, best_first)}) == 3

"""Flat beam search is the ordinary one, and with enough beams both are an enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from m4.eval.decoding.score_references import log_probabilities, penalty
from m4.eval.decoding.search import search
from m4.eval.decoding.settings import Method
from tests.eval.small_model import tiny

SOURCE_BL = np.array(
    [[3, 9, 5, 14, 1, 0, 0, 0], [3, 4, 1, 0, 0, 0, 0, 0], [3, 8, 8, 7, 6, 5, 4, 1]]
)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, {}),
        pytest.param(
            {"moe": None, "absolute_positions": True, "decoder_layers": 2},
            {"no_repeat_ngram": 2},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_flat_beams_are_the_ordinary_ones(changes: dict, method: dict) -> None:
    model, params = tiny(**changes)
    asked: Any = (model, params, SOURCE_BL, 9, 4, 0.6)
    expected, scores = jax.device_get(search(*asked, Method(n_best=4, **method)))
    found, flat_scores = jax.device_get(search(*asked, Method(n_best=4, flat=True, **method)))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(flat_scores, scores, rtol=1e-5)
    assert len(np.unique(expected.reshape(-1, 9), axis=0)) > 9  # the law would be empty otherwise


@pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_enough_beams_find_what_an_enumeration_finds(flat: bool) -> None:
    # Six tokens, five of which continue: 25 beams hold all of two tokens, so nothing is lost.
    model, params = tiny(vocab_size=6)
    source_1L = np.array([[3, 5, 4, 1, 0, 0, 0, 0]])
    kept = [v for v in range(6) if v != 1]
    every = [[*tokens, 1] for n in range(3) for tokens in itertools.product(kept, repeat=n)]
    # Token 0 is padding to a forward pass: of those that have it the search alone can say more.
    every = [tokens for tokens in every if 0 not in tokens]
    targets_BT = np.array([[*tokens, 0, 0][:3] for tokens in every])
    batch = {
        "encoder_input_tokens": np.repeat(source_1L, len(every), axis=0),
        "decoder_target_tokens": targets_BT,
    }
    logp_B = np.asarray(jax.jit(lambda batch: log_probabilities(model, params, batch))(batch))
    scores = [lp / penalty(0.6, len(one)) for lp, one in zip(logp_B, every, strict=True)]
    order = np.argsort(scores)[::-1]
    found, found_scores = jax.device_get(
        search(model, params, source_1L, 3, 25, 0.6, Method(n_best=25, flat=flat))
    )
    ended = [tokens[: tokens.index(1) + 1] for tokens in found[0].tolist() if 1 in tokens]
    plain = [k for k, tokens in enumerate(ended) if 0 not in tokens][:8]
    assert len(plain) == 8
    np.testing.assert_array_equal(found[0, plain], targets_BT[order[:8]])
    np.testing.assert_allclose(found_scores[0, plain], np.sort(scores)[::-1][:8], rtol=1e-4)

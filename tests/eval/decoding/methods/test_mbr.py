"""Minimum Bayes risk against sacreBLEU's own scores of sentences, pair by pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from m4.eval.decoding.decode import utilities
from m4.eval.metrics import Metric
from m4.eval.metrics.bleu import bleu
from m4.eval.metrics.chrf import chrf
from tests.eval.small_model import SETTINGS, Words, sentences, tiny, translations

SAID = ["the cat sat down", "the cat sat", "a dog ran", "the cat sat"]


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        (chrf, lambda said, other: CHRF().sentence_score(said, [other]).score),
        (bleu, lambda said, other: BLEU().corpus_score([said], [[other]]).score),
    ],
)
def test_the_utility_is_the_mean_of_sacrebleus_scores(metric: Metric, score: Any) -> None:
    texts = [f"{one} on the mat today" for one in SAID]
    plain = [np.mean([score(said, other) for other in texts]) for said in texts]
    np.testing.assert_allclose(utilities(texts, metric, "en"), plain, rtol=1e-9)


def test_the_first_translation_is_the_one_most_like_the_others() -> None:
    model, params = tiny(moe=None)
    texts = sentences(5, seed=2)
    beams = replace(SETTINGS, beams=4, n_best=4)
    plain = translations(model, params, Words(), texts, beams)
    ranked = translations(model, params, Words(), texts, replace(beams, mbr=True))
    for before, after in zip(plain, ranked, strict=True):
        gains = utilities(before.texts, chrf, "xx")
        order = np.argsort(-gains, kind="stable")
        assert after.texts == [before.texts[k] for k in order]
        assert after.scores == [before.scores[k] for k in order]
        assert after.utilities == gains[order].tolist()
    assert [one.texts for one in ranked] != [one.texts for one in plain]

"""chrF (Popović, 2015) as sacreBLEU computes it: chrF2 on characters, alike in all languages."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from sacrebleu.metrics.chrf import CHRF

from m4.eval.metrics import Statistics
from m4.settings import configurable


@configurable
def chrf(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Statistics:
    """Returns statistics of corpus chrF2, one reference a sentence; `language` plays no part.

    Its counts of a sentence are n-grams of the hypothesis, of the reference and of both, for
    n = 1..6 characters.
    """
    metric = _with_references(tuple(references))
    rows = metric._extract_corpus_statistics(list(hypotheses), None)
    counts = np.array(rows, np.int64).reshape(len(rows), 3 * CHRF.CHAR_ORDER)
    return Statistics("chrf", counts, _formula, str(metric.get_signature()))


# Systems are scored one after the other on the same references.
@lru_cache(maxsize=1)
def _with_references(references: tuple[str, ...]) -> CHRF:
    return CHRF(references=[references])


def _formula(sums: np.ndarray) -> np.ndarray:
    """CHRF._compute_f_score with its defaults (effective order, no epsilon), vectorised."""
    sums = np.asarray(sums, np.float64)
    hypothesis, reference, match = sums[..., 0::3], sums[..., 1::3], sums[..., 2::3]
    counted = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(counted.sum(axis=-1), 1)
    share = np.where(counted, match, 0.0)
    precision = (share / np.maximum(hypothesis, 1)).sum(axis=-1) / orders
    recall = (share / np.maximum(reference, 1)).sum(axis=-1) / orders
    factor = CHRF.BETA**2
    weighted = factor * precision + recall
    f_score = (1 + factor) * precision * recall / np.where(weighted > 0, weighted, 1.0)
    return 100.0 * f_score

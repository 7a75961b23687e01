"""chrF (Popović, 2015) as sacreBLEU computes it: chrF2 on characters, for all languages alike."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from sacrebleu.metrics.chrf import CHRF

from m4.eval.metrics import References, Statistics, each_of, reference_count
from m4.settings import configurable

# n-grams of a text by order, characters before words.
Ngrams = Sequence[Counter[str]]


@configurable
def chrf(
    hypotheses: Sequence[str], references: References, language: str, sources: Sequence[str] = ()
) -> Statistics:
    """Returns statistics of corpus chrF2; the language is ignored."""
    del language, sources
    return statistics("chrf", CHRF(), characters, hypotheses, each_of(references))


# Cached, since systems are scored one after the other on the same references.
@lru_cache(maxsize=2048)
def characters(text: str) -> Ngrams:
    """Returns n-grams of 1 to 6 characters, without white space."""
    text = "".join(text.split())
    return [
        Counter(text[i : i + n] for i in range(len(text) - n + 1))
        for n in range(1, CHRF.CHAR_ORDER + 1)
    ]


def statistics(
    name: str,
    metric: CHRF,
    ngrams: Callable[[str], Ngrams],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
) -> Statistics:
    """Returns statistics of corpus chrF over n-grams.

    Counts per sentence are n-grams of the hypothesis, of the reference and of both for each order.
    The first reference with the highest score counts.
    """
    rows = []
    for hypothesis, several in zip(hypotheses, references, strict=True):
        of_hypothesis = ngrams(hypothesis)
        found = [_matches(of_hypothesis, ngrams(reference)) for reference in several]
        best = int(np.argmax(_formula(np.array(found)))) if len(found) > 1 else 0
        rows.append(found[best])
    metric.num_refs = reference_count(references)
    counts = np.array(rows, np.int64).reshape(len(rows), 3 * metric.order)
    return Statistics(name, counts, _formula, str(metric.get_signature()))


def _matches(hypothesis: Ngrams, reference: Ngrams) -> list[int]:
    row = []
    for ours, theirs in zip(hypothesis, reference, strict=True):
        both = sum(min(count, theirs[ngram]) for ngram, count in ours.items() if ngram in theirs)
        # An order in which the reference has no n-grams does not count.
        row += [ours.total() if theirs else 0, theirs.total(), both]
    return row


def _formula(sums: np.ndarray) -> np.ndarray:
    """Vectorised F score of sacreBLEU with its defaults (effective order, no epsilon)."""
    # Orders are added one by one, as in sacreBLEU, so that rounding picks the same best reference.
    sums = np.asarray(sums, np.float64)
    hypothesis, reference, match = sums[..., 0::3], sums[..., 1::3], sums[..., 2::3]
    counted = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(counted.sum(axis=-1), 1)
    share = np.where(counted, match, 0.0)
    precision = np.cumsum(share / np.maximum(hypothesis, 1), axis=-1)[..., -1] / orders
    recall = np.cumsum(share / np.maximum(reference, 1), axis=-1)[..., -1] / orders
    factor = CHRF.BETA**2
    weighted = factor * precision + recall
    f_score = (1 + factor) * precision * recall / np.where(weighted > 0, weighted, 1.0)
    return 100.0 * f_score

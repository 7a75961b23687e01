"""Bootstrap resampling (Koehn, 2004) with sacreBLEU's numbers, on sums of sufficient statistics.

sacreBLEU draws all indices from one seeded generator and scores each resample in Python. Here the
same draws become counts per sentence, and the sums one matrix product. All systems resampled with
the same seed and number of sentences see the same resamples.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from m4.eval.metrics import Score, Statistics

RESAMPLES = 1000  # both are sacreBLEU's defaults
SEED = 12345

_KEPT_SENTENCES = 4000
_BLOCK = 1 << 22  # indices drawn at a time: bounds the memory for large test sets


class Difference(NamedTuple):
    """Difference of a system from the baseline in percent, with its 95% interval."""

    delta: float
    low: float
    high: float
    p_value: float  # from sacreBLEU's paired bootstrap test
    replicates: np.ndarray  # the difference in every resample


def interval(samples: np.ndarray) -> tuple[float, float]:
    """Returns the 95% interval of resampled scores: sacreBLEU's order statistics."""
    ordered = np.sort(samples)
    lower = len(ordered) // 40
    return float(ordered[lower]), float(ordered[len(ordered) - lower - 1])


def resample(statistics: Statistics) -> np.ndarray:
    """Returns the scores of resampled test sets, float64 [resamples]."""
    counts = statistics.counts.astype(np.float64)
    draws = _kept_draws if statistics.sentences <= _KEPT_SENTENCES else _draws
    blocks = draws(statistics.sentences)
    sums = [times.astype(np.float64) @ counts for times in blocks]
    return np.concatenate([statistics.formula(each) for each in sums])


def _draws(sentences: int) -> Iterator[np.ndarray]:
    """Yields how often each sentence is in each resample, [resamples, sentences] in blocks."""
    kind = np.uint16 if sentences < 1 << 16 else np.uint32
    rng = np.random.default_rng(SEED)
    step = max(1, _BLOCK // sentences)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        indices = rng.choice(sentences, size=(rows, sentences), replace=True)
        # Each resample has its own range of numbers, so that one bincount counts them all.
        indices += np.arange(rows)[:, None] * sentences
        times = np.bincount(indices.ravel(), minlength=rows * sentences)
        yield times.reshape(rows, sentences).astype(kind)


# Cached, since all systems and metrics of a test set share the draws, which take most of the time.
# An entry has at most 8 MB; 102 languages with 42,000 sentences in all take 84 MB.
@lru_cache(maxsize=128)
def _kept_draws(sentences: int) -> tuple[np.ndarray, ...]:
    return tuple(_draws(sentences))


def score(statistics: Statistics) -> Score:
    """Returns the score of all sentences and a 95% interval, which need not contain it."""
    low, high = interval(resample(statistics))
    signature = _signature(statistics.signature)
    return Score(statistics.value(), signature, low, high, statistics.sentences)


def paired_difference(system: Statistics, baseline: Statistics) -> Difference:
    """Returns the difference of a system from the baseline, scored on the same resamples.

    This is sacreBLEU's paired bootstrap with one departure: if no resample distinguishes the two,
    p_value is 1 (its formula gives equal systems its smallest value, 1 / (RESAMPLES + 1)).
    """
    assert system.metric == baseline.metric
    assert system.signature == baseline.signature
    assert system.sentences == baseline.sentences, "not the same sentences"
    replicates = resample(system) - resample(baseline)
    delta = system.value() - baseline.value()
    low, high = interval(replicates)
    if not replicates.any():
        return Difference(delta, low, high, 1.0, replicates)
    centred = np.abs(replicates) - np.abs(replicates).mean()
    p_value = (np.count_nonzero(centred > abs(delta)) + 1) / (RESAMPLES + 1)
    return Difference(delta, low, high, float(p_value), replicates)


def normal_p_value(delta: float, replicates: np.ndarray) -> float:
    """Returns the two-sided p-value of a difference, with the standard error of its replicates.

    Counting resamples gives no p below 1 / (RESAMPLES + 1): above 5% when corrected for 50 tests.
    """
    error = float(np.std(replicates))
    if error == 0.0:
        return 1.0  # one sentence or two equal systems: unknown
    return math.erfc(abs(delta) / error / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values, in order, corrected for testing all of them (Holm, 1979)."""
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(count, 0, -1)
    ordered = np.minimum(np.maximum.accumulate(np.asarray(p_values, float)[order] * factors), 1.0)
    found = np.empty(count)
    found[order] = ordered
    return found.tolist()


def _signature(signature: str) -> str:
    """Adds the fields of the bootstrap where sacreBLEU puts them: after the first field."""
    first, _, rest = signature.partition("|")
    return "|".join(filter(None, [first, f"bs:{RESAMPLES}", f"seed:{SEED}", rest]))

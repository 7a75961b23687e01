"""TER (Snover et al., 2006) as sacreBLEU computes it: edits per word of the references."""

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.ter import TER

from m4.eval.metrics import References, Statistics, each_of, reference_count
from m4.settings import configurable


@configurable
def ter(
    hypotheses: Sequence[str], references: References, language: str, sources: Sequence[str] = ()
) -> Statistics:
    """Returns statistics of corpus TER (lower is better); the language is ignored.

    Counts per sentence are the edits to the nearest reference and the mean length of all.
    """
    del language, sources
    metric, several = TER(), each_of(references)
    rows = []
    for hypothesis, given in zip(hypotheses, several, strict=True):
        one = metric.corpus_score([hypothesis], [[reference] for reference in given])
        rows.append([one.num_edits, one.ref_length])
    metric.num_refs = reference_count(several)
    counts = np.array(rows, np.float64).reshape(len(rows), 2)
    return Statistics("ter", counts, _formula, str(metric.get_signature()), lower_is_better=True)


def _formula(sums: np.ndarray) -> np.ndarray:
    edits, words = sums[..., 0], sums[..., 1]
    # Without reference words, any edit is an error of 100%.
    return 100.0 * np.where(words > 0, edits / np.where(words > 0, words, 1), edits > 0)

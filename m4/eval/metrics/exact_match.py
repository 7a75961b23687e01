"""Exact match: the share of translations that equal a reference."""

from collections.abc import Sequence

import numpy as np

from m4.eval.metrics import References, Statistics, each_of, reference_count
from m4.settings import configurable


@configurable
def exact_match(
    hypotheses: Sequence[str], references: References, language: str, sources: Sequence[str] = ()
) -> Statistics:
    """Returns statistics of exact match, ignoring white space around a text."""
    del language, sources
    several = each_of(references)
    rows = [
        [hypothesis.strip() in {reference.strip() for reference in given}, 1]
        for hypothesis, given in zip(hypotheses, several, strict=True)
    ]
    counts = np.array(rows, np.int64).reshape(len(rows), 2)
    count = reference_count(several)
    signature = f"nrefs:{'var' if count < 0 else count}|case:mixed|space:stripped"
    return Statistics("exact_match", counts, _formula, signature)


def _formula(sums: np.ndarray) -> np.ndarray:
    return 100.0 * sums[..., 0] / np.maximum(sums[..., 1], 1)

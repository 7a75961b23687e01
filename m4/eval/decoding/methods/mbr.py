"""Minimum Bayes risk: of several translations the one that is most like the others.

Kumar and Byrne 2004; Eikema and Aziz 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from m4.eval.metrics import Metric


def utilities(candidates: Sequence[str], metric: Metric, language: str) -> np.ndarray:
    """Returns each candidate's mean metric with every candidate as reference, percent: [K].

    Equal candidates count as often as they come: of samples this is the expectation under the
    model.
    """
    count = len(candidates)
    hypotheses = [each for each in candidates for _ in candidates]
    statistics = metric(hypotheses, list(candidates) * count, language)
    return statistics.formula(statistics.counts).reshape(count, count).mean(axis=1)

"""Metrics: one file a metric, each with a function that is a `Metric`.

A metric gives its sufficient statistics, one row of counts a sentence, and the formula from sums
of rows to a score. Subsets, bootstrap intervals and paired tests (bootstrap.py) need no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Score:
    """A corpus score in percent, how it was computed (sacreBLEU's signature), its 95% bootstrap
    interval, and the number of sentences."""

    value: float
    signature: str
    low: float
    high: float
    sentences: int


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a corpus score is computed from.

    counts: int64 [sentences, counts], additive over sentences.
    formula: sums of rows [..., counts] -> scores in percent [...].
    metric: its name in scores.jsonl and in file names: letters, digits, "_", "-", ".".
    signature: sacreBLEU's, without the fields of the bootstrap; of another metric any text that
        says how it was computed.
    """

    metric: str
    counts: np.ndarray
    formula: Callable[[np.ndarray], np.ndarray]
    signature: str

    @property
    def sentences(self) -> int:
        return len(self.counts)

    def value(self) -> float:
        """The score of all sentences, percent."""
        return float(self.formula(self.counts.sum(axis=0)))

    def select(self, keep: Sequence[bool]) -> Statistics:
        """The statistics of the sentences that are marked True."""
        assert len(keep) == self.sentences
        return replace(self, counts=self.counts[np.asarray(keep, bool)])


class Metric(Protocol):
    """(hypotheses, references, m4 code of the target language) -> sufficient statistics."""

    def __call__(
        self, hypotheses: Sequence[str], references: Sequence[str], language: str
    ) -> Statistics: ...

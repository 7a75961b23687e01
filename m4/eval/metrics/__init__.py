"""Metrics: one file per metric, each with a function that is a `Metric`.

A metric gives its sufficient statistics, one row of counts per sentence, and the formula from sums
of rows to a score. Subsets, bootstrap intervals and paired tests (bootstrap.py) need nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from m4.settings import SettingError, shown

NAME = r"[\w.-]+"  # allowed name of a metric in scores.jsonl and file names
# References of each sentence: one text or several.
References = Sequence[str | Sequence[str]]


class Score(NamedTuple):
    """A corpus score in percent, with sacreBLEU's signature and its 95% bootstrap interval."""

    value: float
    signature: str
    low: float
    high: float
    sentences: int


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sufficient statistics of a corpus score."""

    metric: str  # name of the metric, matching `NAME`
    counts: np.ndarray  # int64 or float64 [sentences, counts], additive over sentences
    # Turns sums of rows [..., counts] into scores in percent [...].
    formula: Callable[[np.ndarray], np.ndarray]
    # sacreBLEU's signature without the fields of the bootstrap; for another metric, any text that
    # says how it was computed.
    signature: str
    lower_is_better: bool = False

    @property
    def sentences(self) -> int:
        return len(self.counts)

    def value(self) -> float:
        """Returns the score of all sentences, in percent."""
        return float(self.formula(self.counts.sum(axis=0)))

    def select(self, keep: Sequence[bool]) -> Statistics:
        """Returns the statistics of the sentences marked True."""
        assert len(keep) == self.sentences
        return replace(self, counts=self.counts[np.asarray(keep, bool)])


class Metric(Protocol):
    """Function (hypotheses, references, m4 code of the target language, sources) -> statistics."""

    def __call__(
        self,
        hypotheses: Sequence[str],
        references: References,
        language: str,
        sources: Sequence[str],
    ) -> Statistics: ...


def each_of(references: References) -> list[Sequence[str]]:
    """Returns the references of each sentence as a list."""
    return [[one] if isinstance(one, str) else one for one in references]


def reference_count(references: Sequence[Sequence[str]]) -> int:
    """Returns the number of references per sentence, or sacreBLEU's -1 if it varies."""
    counts = {len(several) for several in references}
    return counts.pop() if len(counts) == 1 else -1


def counted(
    metric: Metric,
    hypotheses: Sequence[str],
    references: References,
    language: str,
    sources: Sequence[str],
) -> Statistics:
    """Returns a metric's statistics. Raises SettingError if a user's own metric returns others."""
    found: Any = metric(hypotheses, references, language, sources)
    count = len(hypotheses)
    if not (
        isinstance(found, Statistics)
        and re.fullmatch(NAME, found.metric)
        and np.ndim(found.counts) == 2
        and len(found.counts) == count
        and np.shape(found.formula(found.counts)) == (count,)
    ):
        allowed = (
            "functions that return m4.eval.metrics.Statistics(name of letters, digits, _, - and "
            f"., counts [{count} sentences, counts], formula of [..., counts], signature)"
        )
        raise SettingError("Decoding.metrics", metric, f"{allowed}; it returned {shown(found)}")
    return found

"""Settings of translation and metrics."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from m4.eval.decoding.sampling import Sampling
from m4.eval.metrics import Metric
from m4.eval.metrics.bleu import bleu
from m4.eval.metrics.chrf import chrf
from m4.settings import MUTABLE, Between, Count, Factor, SettingError, Size, checked

_Length = Between(2, 2**20)  # a piece and EOS


@checked
@dataclass(frozen=True)
class Decoding:
    """Settings of beam search or sampling, and the metrics of the translations.

    Attributes:
        beams: Number of beams, K; 1 is greedy search.
        alpha: Exponent of the length penalty.
        max_source_length: Maximum pieces of a source with tag and EOS; longer ones are cut.
        max_target_length: Maximum tokens of a translation with EOS. For sources padded to L tokens
            the limit is min(max_target_length, a L + 16 + min_length), where a is 2, or more if
            the training pairs of a direction need it (`m4.data.cache.tokens`).
        batch_rows: Sentences per batch.
        test_sentences: Maximum sentences of a test set, evenly spaced. Defaults to all.
        metrics: Metrics of scores.jsonl; the first one is also that of Δ and its plot.
        n_best: Number of translations per sentence: the best beams, or as many samples. The
            first one is scored.
        sampling: Settings to draw translations with. Defaults to beam search.
        prefix: Text that every translation begins with.
        min_length: Minimum pieces of a translation.
        no_repeat_ngram: Size n of n-grams that may not repeat in a translation; 0 allows all.
        mbr: Whether to order the n_best by their mean `mbr_metric` against each other, the best
            first (minimum Bayes risk).
        mbr_metric: Sentence metric for `mbr`.
    """

    beams: Annotated[int, Between(1, 1024), MUTABLE] = 4
    alpha: Annotated[Factor, MUTABLE] = 0.6
    max_source_length: Annotated[int, _Length, MUTABLE] = 128
    max_target_length: Annotated[int, _Length, MUTABLE] = 128
    batch_rows: Annotated[Size, MUTABLE] = 64
    test_sentences: Annotated[Size | None, MUTABLE] = None
    metrics: Annotated[Sequence[Metric], MUTABLE] = (bleu, chrf)
    n_best: Annotated[Size, MUTABLE] = 1
    sampling: Annotated[Sampling | None, MUTABLE] = None
    prefix: Annotated[str | None, MUTABLE] = None
    min_length: Annotated[Count, MUTABLE] = 0
    no_repeat_ngram: Annotated[Count, MUTABLE] = 0
    mbr: Annotated[bool, MUTABLE] = False
    mbr_metric: Annotated[Metric, MUTABLE] = chrf

    def __post_init__(self) -> None:
        if not self.metrics:
            raise SettingError("Decoding.metrics", self.metrics, "a list of one metric or more")
        if self.sampling is None and self.n_best > self.beams:
            allowed = f"at most Decoding.beams = {self.beams}"
            raise SettingError("Decoding.n_best", self.n_best, allowed)
        if self.min_length >= self.max_target_length:
            allowed = f"below Decoding.max_target_length = {self.max_target_length}"
            raise SettingError("Decoding.min_length", self.min_length, allowed)
        if self.mbr and self.n_best < 2:
            raise SettingError("Decoding.n_best", self.n_best, "2 or more, with Decoding.mbr")

    def search(self) -> dict[str, Any]:
        """Returns the settings that decide a translation, as JSON.

        Rarely used settings are left out at their defaults.
        """
        special = {
            "n_best": self.n_best,
            "sampling": self.sampling and asdict(self.sampling),
            "prefix": self.prefix,
            "min_length": self.min_length,
            "no_repeat_ngram": self.no_repeat_ngram,
            "mbr": self.mbr and _name_of(self.mbr_metric),
        }
        given = {name: x for name, x in special.items() if x != getattr(DEFAULTS, name)}
        always = ("beams", "alpha", "max_source_length", "max_target_length", "batch_rows")
        return given | {name: getattr(self, name) for name in always}

    def translated(self) -> dict[str, Any]:
        """Returns everything that decides the translations of a test set, as JSON."""
        made = self.search() | {"test_sentences": self.test_sentences}
        return json.loads(json.dumps(made))  # as it will be read: tuples become lists

    def differing(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that differ from `own`, another's `translated`; {} if it is {}."""
        mine = self.translated()
        names = [name for name in {**mine, **own} if mine.get(name) != own.get(name)]
        return {name: getattr(self, name) for name in names} if own else {}

    def trial(self, own: Mapping[str, Any]) -> str:
        """Returns `differing` as the name of a folder, "beams=1,test_sentences=20", or ""."""
        values = self.differing(own)
        for name, value in values.items():
            if value is not None and not isinstance(value, bool | int | float):
                said = json.dumps([value, self.translated().get(name)], default=str)
                values[name] = hashlib.sha256(said.encode()).hexdigest()[:8]
        return ",".join(f"{name}={value}" for name, value in values.items())


def _name_of(metric: Metric) -> Any:
    """Returns a metric and its arguments, as JSON."""
    if isinstance(metric, functools.partial):
        return [_name_of(metric.func), [*metric.args], dict(metric.keywords)]
    return getattr(metric, "__qualname__", type(metric).__qualname__)


DEFAULTS = Decoding()

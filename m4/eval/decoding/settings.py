"""What decides how sentences are translated and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from m4.eval.metrics import Metric
from m4.eval.metrics.bleu import bleu
from m4.eval.metrics.chrf import chrf
from m4.settings import MUTABLE, Between, Factor, SettingError, Size, checked

_Length = Between(2, 2**20)  # a piece and EOS


@checked
@dataclass(frozen=True)
class Decoding:
    """Beam search over batches, and the metrics of its translations.

    Attributes:
        beams: K; 1 is greedy search.
        alpha: exponent of the length penalty.
        max_source_length: pieces of a source with tag and EOS; longer ones are cut.
        max_target_length: tokens of a translation with EOS. Sources that are padded to L tokens
            have the limit min(max_target_length, 2 L + 16).
        batch_rows: sentences a batch of a test set.
        metrics: of scores.jsonl; the first one is the one of Δ and its plot.
    """

    beams: Annotated[Size, MUTABLE] = 4
    alpha: Annotated[Factor, MUTABLE] = 0.6
    max_source_length: Annotated[int, _Length, MUTABLE] = 128
    max_target_length: Annotated[int, _Length, MUTABLE] = 128
    batch_rows: Annotated[Size, MUTABLE] = 64
    metrics: Annotated[Sequence[Metric], MUTABLE] = (bleu, chrf)

    def __post_init__(self) -> None:
        if not self.metrics:
            raise SettingError("Decoding.metrics", self.metrics, "a list of one metric or more")

    def search(self) -> dict[str, Any]:
        """The settings that decide a translation: numbers by name."""
        return {
            "beams": self.beams,
            "alpha": self.alpha,
            "max_source_length": self.max_source_length,
            "max_target_length": self.max_target_length,
            "batch_rows": self.batch_rows,
        }


DEFAULTS = Decoding()

"""Counts of how full the batches are that a model translates, and how fast it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from m4.data.preprocess import EOS_ID
from m4.eval.decoding.decode import Batch


@dataclass
class BatchCounts:
    """`decode`'s `on_batch`: counts sentences and tokens, and the places of their batches.

    A batch [B, L] of sources and [B, T] of translations, T the longest one's tokens, has B * (L+T)
    places. Those of padding, and of rows that only fill it up, have no real token.

    Attributes:
        sentences: Number of sentences.
        tokens: Tokens of translations, with EOS.
        real: Tokens of sources and translations.
        places: Places of the batches.
        unended: Rows whose translation reached the limit of its length.
    """

    sentences: int = 0
    tokens: int = 0
    real: int = 0
    places: int = 0
    unended: list[int] = field(default_factory=list)
    _start: float = field(default_factory=time.monotonic)

    def __call__(self, batch: Batch, best_BT: np.ndarray) -> None:
        asked = len(batch.rows)
        translated = int(np.count_nonzero(best_BT[:asked]))
        self.sentences += asked
        self.tokens += translated
        self.real += translated + int(np.count_nonzero(batch.tokens_BL[:asked]))
        longest = int(np.count_nonzero(best_BT, axis=1).max())
        self.places += len(best_BT) * (batch.tokens_BL.shape[1] + longest)
        ended = (best_BT[:asked] == EOS_ID).any(axis=1)
        self.unended += [row for row, at in zip(batch.rows, ended, strict=True) if not at]

    @property
    def seconds(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._start

    def said(self) -> str:
        """Returns the line for the job's end: "2,011 sentences, 34,112 tokens in 61.0 s: ..."."""
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.sentences:,} sentences, {self.tokens:,} tokens in {seconds:,.1f} s: "
            f"{self.sentences / seconds:,.1f} sentences/s, {self.tokens / seconds:,.0f} tokens/s; "
            f"{self.real / max(self.places, 1):.0%} of the batches are real tokens"
        )

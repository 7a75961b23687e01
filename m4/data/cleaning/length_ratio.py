"""Bad length ratios: one side says much more than the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from m4.data.cleaning import Findings, Opened
from m4.data.cleaning.chunk import Chunk
from m4.settings import Between, OneOf, checked

UNITS = ("characters", "bytes")


@checked
@dataclass(frozen=True)
class LengthRatio:
    """Drops a pair whose non-English side is more than `bound` times too long or too short.

    A Chinese sentence has a quarter of the characters of an English one: what is expected is the
    median of translation / English over the language's own pairs, in `unit`s. `slack`, in units of
    English, is added to both sides (to the translation times the median), so that a few characters
    more or less in a short sentence are no bad ratio:

        r = (translation / median + slack) / (english + slack), kept where 1/bound <= r <= bound.

    A language with fewer than `fewest` pairs has no median to trust and is not checked.
    """

    bound: Annotated[float, Between(1, 1e6)] = 2.5
    slack: Annotated[float, Between(0, 1e6)] = 10.0
    fewest: Annotated[int, Between(1, 10**9)] = 50
    unit: Annotated[str, OneOf(UNITS)] = "characters"

    @property
    def name(self) -> str:
        return "length_ratio"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, languages: Sequence[str]) -> Opened:
        def check(language: str, split: str) -> _Ratio:
            return _Ratio(self)

        return check


class _Ratio:
    """The check of one language: `fit` finds the median."""

    def __init__(self, settings: LengthRatio) -> None:
        self._settings = settings
        self._median: float | None = None

    def fit(self, chunks: Iterator[Chunk]) -> None:
        # 4 bytes a pair.
        ratios = [np.zeros(0, np.float32)]
        for chunk in chunks:
            english, translation = self._lengths(chunk)
            there = (english > 0) & (translation > 0)
            ratios.append((translation[there] / english[there]).astype(np.float32))
        found = np.concatenate(ratios)
        if len(found) >= self._settings.fewest:
            self._median = float(np.median(found))

    def __call__(self, chunk: Chunk) -> Findings:
        if self._median is None:
            few = f"fewer than {self._settings.fewest} pairs"
            return Findings(not_checked={few: np.ones(len(chunk), bool)})
        english, translation = self._lengths(chunk)
        slack, bound = self._settings.slack, self._settings.bound
        wanted = english + slack
        got = translation / self._median + slack
        return Findings(
            {"translation side too long": got > bound * wanted,
             "translation side too short": wanted > bound * got}
        )  # fmt: skip

    def _lengths(self, chunk: Chunk) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._settings.unit == "characters":
            return chunk.lengths("english"), chunk.lengths("translation")
        return _bytes(chunk.english), _bytes(chunk.translation)


def _bytes(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    lengths = (len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return np.fromiter(lengths, np.int64, len(texts))

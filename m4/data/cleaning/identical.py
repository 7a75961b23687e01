"""Identical source and target: what was left untranslated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from m4.data.cleaning import Check, Findings, Opened, check_number
from m4.data.cleaning.chunk import Chunk


@dataclass(frozen=True)
class Identical:
    """Drops a pair whose sides are the same, but for case, width and spacing.

    Sides of at most `name_words` words stay: names, numbers and titles are rightly the same.
    """

    name_words: int = 3

    def __post_init__(self) -> None:
        check_number(self.name_words, 0, "identical.Identical.name_words")

    @property
    def name(self) -> str:
        return "identical"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, languages: Sequence[str]) -> Opened:
        def check(language: str, split: str) -> Check:
            return self._check

        return check

    def _check(self, chunk: Chunk) -> Findings:
        same = chunk.normal_digests("english") == chunk.normal_digests("foreign")
        for row in np.flatnonzero(same):
            same[row] = len(chunk.english[row].split()) > self.name_words
        return Findings({"both sides": same})

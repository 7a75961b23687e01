"""Identical source and target: what was left untranslated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from m4.data.cleaning import Check, Findings, Opened
from m4.data.cleaning.chunk import Chunk
from m4.settings import Between, checked


@checked
@dataclass(frozen=True)
class Identical:
    """Drops a pair whose sides are the same, but for case, width and spacing.

    Sides of at most `name_words` words stay: names, numbers and titles are rightly the same.
    """

    name_words: Annotated[int, Between(0, 10**6)] = 3

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
        same = chunk.normal_digests("english") == chunk.normal_digests("translation")
        for row in np.flatnonzero(same):
            same[row] = len(chunk.english[row].split()) > self.name_words
        return Findings({"both sides": same})

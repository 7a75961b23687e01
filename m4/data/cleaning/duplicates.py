"""Duplicates: pairs that a language's training text has already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from m4.data.cleaning import Check, Findings, Opened
from m4.data.cleaning.chunk import Chunk
from m4.data.cleaning.keys import U64, Digests, both
from m4.settings import OneOf, checked

BY = ("pair", "english", "translation")


@checked
@dataclass(frozen=True)
class Duplicates:
    """Keeps the first of the pairs of a language and split that are the same.

    by: "pair" (both sides the same), "english" or "translation" (that side alone: one translation a
    sentence). normalised: also those that differ in case, width and spacing only. 8 bytes of memory
    a pair, 16 with normalised.
    """

    by: Annotated[str, OneOf(BY)] = "pair"
    normalised: bool = False

    @property
    def name(self) -> str:
        return "duplicates"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, languages: Sequence[str]) -> Opened:
        def check(language: str, split: str) -> Check:
            exact, normalised = Digests(), Digests()
            what = "pair" if self.by == "pair" else f"{self.by} side"

            def look(chunk: Chunk) -> Findings:
                repeated = ~exact.add(self._keys(chunk, False))
                drop = {f"exact {what}": repeated}
                if self.normalised:
                    alike = ~normalised.add(self._keys(chunk, True))
                    drop[f"normalised {what}"] = alike & ~repeated
                return Findings(drop)

            return look

        return check

    def _keys(self, chunk: Chunk, normalised: bool) -> U64:
        digests = chunk.normal_digests if normalised else chunk.digests
        if self.by == "pair":
            return both(digests("english"), digests("translation"))
        return digests(self.by)

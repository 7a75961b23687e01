"""Too long: in characters, before anything is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from m4.data.cleaning import Check, Findings, Opened
from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES
from m4.settings import Between, checked


@checked
@dataclass(frozen=True)
class Length:
    """Drops a pair with a side of more than `most_characters`.

    Sentences that are too long in pieces are dropped when they are tokenized, whatever is set here
    (CorpusSpec.lengths); this stage saves the work, and drops whole paragraphs.
    """

    most_characters: Annotated[int, Between(1, 10**9)] = 1000

    @property
    def name(self) -> str:
        return "length"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, languages: Sequence[str]) -> Opened:
        def check(language: str, split: str) -> Check:
            return self._check

        return check

    def _check(self, chunk: Chunk) -> Findings:
        return Findings(
            {f"{side} side": chunk.lengths(side) > self.most_characters for side in SIDES}
        )

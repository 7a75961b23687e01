"""Too long: in characters, before anything is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from m4.data.cleaning import Check, Findings, Opened, check_number
from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES


@dataclass(frozen=True)
class Length:
    """Drops a pair with a side of more than `most_characters`.

    Sentences that are too long in pieces are dropped when they are tokenized, whatever is set here
    (jobs.Setup.lengths); this stage saves the work, and drops whole paragraphs.
    """

    most_characters: int = 1000

    def __post_init__(self) -> None:
        check_number(self.most_characters, 1, "length.Length.most_characters")

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

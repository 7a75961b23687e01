"""A source of given pairs, and cleaning it by a few stages, for the tests of cleaning."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m4.data.cleaning import CleaningStage, Findings
from m4.data.cleaning.chunk import Chunk
from m4.data.cleaning.clean import Cleaner, Cleaning
from m4.data.cleaning.ledger import Ledger
from m4.data.directions import key_of, pair_of
from m4.data.sources import SPLITS, Pair


class Listed:
    """A Source of given pairs: {("gl" or "fr-wo", split): [(first, second), ...]}."""

    def __init__(self, pairs: dict[tuple[str, str], list[tuple[str, str]]]) -> None:
        self.listed = {(pair_of(name), split): of for (name, split), of in pairs.items()}

    def language_pairs(self) -> list[str]:
        return list(dict.fromkeys(pair for pair, _ in self.listed))

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        return (Pair(*texts) for texts in self.listed.get((pair, split), []))

    def identity(self) -> dict:
        return {"source": "listed"}


def run(
    stages: list[CleaningStage], source: Any, folder: Path, **more: Any
) -> tuple[dict[tuple[str, str], list[Pair]], Ledger]:
    """Returns the pairs left of each pair of languages ("gl") and split, and the ledger."""
    cleaner = Cleaner(Cleaning(stages), source, source.language_pairs(), folder, **more)
    kept = {}
    for split in reversed(SPLITS):
        for code in source.language_pairs():
            parts = list(cleaner.pairs(code, split))
            kept[key_of(code), split] = [
                Pair(*pair) for part in parts for pair in zip(part.first, part.second, strict=True)
            ]
    return kept, cleaner.finish()


def dropped(
    stage: CleaningStage, pairs: list[tuple[str, str]], tmp_path: Path, code: str = "gl"
) -> Any:
    """Returns index -> reason for the pairs that the stage drops."""
    reasons: dict[int, str] = {}
    source = Listed({(code, "train"): pairs})
    kept, _ = run([stage], source, tmp_path, on_drop=lambda *of: reasons.update({of[3] - 1: of[0]}))
    assert kept[code, "train"] == [pair for row, pair in enumerate(pairs) if row not in reasons]
    return reasons


@dataclasses.dataclass(frozen=True)
class Killed(CleaningStage):
    """Stage that kills its worker once, at a pair with the word."""

    name = "killed"
    mark: str = ""

    def identity(self) -> dict[str, Any]:
        return {}

    def check(self, chunk: Chunk) -> Findings:
        mark = Path(self.mark)
        if mark.is_file() and any(text == "Kill" for text in chunk.first):
            mark.unlink()
            os._exit(9)
        return Findings()


@dataclasses.dataclass(frozen=True)
class Raises(CleaningStage):
    """Stage with a mistake: it fails at a pair with the word."""

    name = "raises"
    word: str = ""

    def check(self, chunk: Chunk) -> Findings:
        if self.word in chunk.first:
            raise ZeroDivisionError("a mistake of Raises")
        return Findings()

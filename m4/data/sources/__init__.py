"""Sources of sentence pairs: one file a source, each with a class that is a Source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

SPLITS = ("train", "dev", "test")


class Pair(NamedTuple):
    """An English sentence and its translation."""

    english: str
    translation: str


class Source(Protocol):
    """What gives English-centric sentence pairs.

    A source may also have `subsets(language, split) -> dict[str, list[bool]]`: marks for the
    sentences of pairs(), in their order, for scores of each ({"seen": [...]}). And one of files
    `origin`: (file, line) of the pair that pairs() gave last.
    """

    def languages(self) -> list[str]:
        """The m4 codes of the languages that it has, English excepted."""
        ...

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        """The pairs of a language in one of SPLITS, in the same order every time."""
        ...

    def identity(self) -> dict:
        """All that decides the text, as JSON: what a cached result is keyed by. Cheap."""
        ...

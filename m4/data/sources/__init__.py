"""Sources of sentence pairs: one file a source, each with a class that is a Source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeGuard

from m4.data.vocabulary.ragged import Ragged

SPLITS = ("train", "dev", "test")


class Pair(NamedTuple):
    """An English sentence and its translation."""

    english: str
    translation: str


class Source(Protocol):
    """What gives English-centric sentence pairs.

    A source may also have `subsets(language, split) -> dict[str, list[bool]]`: marks for the
    sentences of pairs(), in their order, for scores of each ({"seen": [...]}). And one of files
    `origin`: (file, line) of the pair that pairs() gave last. And `rates() -> dict[str, float]`:
    direction -> how often it is to be drawn, for the sampler mixing_rates.
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


class IdBlock(NamedTuple):
    """Some pairs as ids, eos included, with their texts before they were tokenized ('': none)."""

    inputs: Ragged
    targets: Ragged
    texts: list[Pair]


class IdSource(Source, Protocol):
    """A source of ids in its own vocabulary, which are trained on as they are: no tag, no cleaning.

    "english" is what a model reads and "translation" what it writes, in whatever language.
    """

    gives_ids: bool

    def blocks(self, language: str, split: str) -> Iterator[IdBlock]:
        """The pairs of a language in one of SPLITS, in the same order every time."""
        ...

    def vocabularies(self) -> dict[str, bytes]:
        """ "source" and "target" -> SentencePiece models; the same bytes: one vocabulary."""
        ...


def gives_ids(source: object) -> TypeGuard[IdSource]:
    """Whether a source gives ids in the place of text."""
    return bool(getattr(source, "gives_ids", False))

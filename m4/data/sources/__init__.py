"""Sources of sentence pairs: one file per source, with a class that is a Source."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeGuard

from etils import epath

from m4.data.vocabulary import Ragged

SPLITS = ("train", "dev", "test")


class Pair(NamedTuple):
    """A sentence and its translation, in the languages of their pair's name."""

    first: str
    second: str


class Source(Protocol):
    """A source of sentence pairs by language pair ("en-gl", "fr-wo": `m4.data.directions`).

    It may also have `shards(pair, split) -> list[Shard]`, parts that other processes may read;
    `subsets(pair, split) -> dict[str, list[bool]]`, marks of the sentences in
    the order of pairs(), for scores of each subset ({"seen": [...]}); `reading`, a
    `reading.lines.Reading` with the origin of the last pair and counts of bad lines; and
    `rates() -> dict[str, float]`, direction -> its rate for the sampler mixing_rates.
    """

    def language_pairs(self) -> list[str]:
        """Returns the names of its language pairs, English first, otherwise sorted by code."""
        ...

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of one of SPLITS, always in the same order."""
        ...

    def identity(self) -> dict:
        """Returns, quickly, JSON of everything that decides the text: the key of a corpus."""
        ...


class Shard(NamedTuple):
    """A part of a split that can be read separately, such as a file: its files and pairs."""

    paths: tuple[epath.Path, ...]
    pairs: Callable[[], Iterator[Pair]]


def shards_of(source: Source, pair: str, split: str) -> list[Shard]:
    """Returns the shards that make up a split, in order; by default a single one."""
    if (own := getattr(source, "shards", None)) is not None:
        return own(pair, split)
    return [Shard((), lambda: source.pairs(pair, split))]


class IdBlock(NamedTuple):
    """Some pairs as ids, with eos, and their texts before tokenizing, or ''."""

    inputs: Ragged
    targets: Ragged
    texts: list[Pair]


class IdSource(Source, Protocol):
    """A source of ids in its own vocabulary, which training uses unchanged, without tag.

    A model reads the first side and writes the second one, in any language.
    """

    gives_ids: bool

    def blocks(self, pair: str, split: str) -> Iterator[IdBlock]:
        """Yields the pairs of one of SPLITS, always in the same order."""
        ...

    def vocabularies(self) -> dict[str, bytes]:
        """Returns the SentencePiece models of "source" and "target"; equal ones are shared."""
        ...


def gives_ids(source: object) -> TypeGuard[IdSource]:
    """Returns whether a source gives ids instead of text."""
    return bool(getattr(source, "gives_ids", False))

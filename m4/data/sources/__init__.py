"""Sources of sentence pairs: one file each, with a class that is a Source."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeGuard

from etils import epath

from m4.data.vocabulary import Ragged

SPLITS = ("train", "dev", "test")


class Pair(NamedTuple):
    """A sentence and its translation, in the languages that the name of their pair says."""

    first: str
    second: str


class Source(Protocol):
    """A source of sentence pairs, by pair of languages ("en-gl", "fr-wo": `m4.data.directions`).

    It may also have `shards(pair, split) -> list[Shard]`, parts that other processes may read;
    `subsets(pair, split) -> dict[str, list[bool]]`, marks of the sentences in
    the order of pairs(), for scores of each subset ({"seen": [...]}); `reading`, a
    `reading.lines.Reading` with the origin of the last pair and counts of bad lines; and
    `rates() -> dict[str, float]`, direction -> its rate for the sampler mixing_rates.
    """

    def language_pairs(self) -> list[str]:
        """Returns the names of its pairs of languages, English first, else by their codes."""
        ...

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the sentence pairs of one of SPLITS, in the same order every time."""
        ...

    def identity(self) -> dict:
        """Returns all that decides the text, as JSON; it is quick, and the key of a corpus."""
        ...


class Shard(NamedTuple):
    """A part of a split that is read on its own, such as a file: its path, and its pairs."""

    path: epath.Path | None
    pairs: Callable[[], Iterator[Pair]]


def shards_of(source: Source, pair: str, split: str) -> list[Shard]:
    """Returns the shards of a split, which in their order have its pairs: by default one."""
    if (own := getattr(source, "shards", None)) is not None:
        return own(pair, split)
    return [Shard(None, lambda: source.pairs(pair, split))]


class IdBlock(NamedTuple):
    """Some pairs as ids, with eos, and with their texts before tokenizing, or ''."""

    inputs: Ragged
    targets: Ragged
    texts: list[Pair]


class IdSource(Source, Protocol):
    """A source of ids in its own vocabulary, which are trained on as they are, without tag.

    The first side is what a model reads and the second one what it writes, in whatever language.
    """

    gives_ids: bool

    def blocks(self, pair: str, split: str) -> Iterator[IdBlock]:
        """Yields the pairs of one of SPLITS, in the same order every time."""
        ...

    def vocabularies(self) -> dict[str, bytes]:
        """Returns SentencePiece models of "source" and "target"; equal ones are one vocabulary."""
        ...


def gives_ids(source: object) -> TypeGuard[IdSource]:
    """Returns whether a source gives ids instead of text."""
    return bool(getattr(source, "gives_ids", False))

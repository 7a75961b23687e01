"""A source that is joined with the corpus of an older model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from m4.data.cache.cache import Cache
from m4.data.directions import key_of, pair_of
from m4.data.sources import Pair, Source
from m4.settings import InputError, checked


@checked
@dataclass(frozen=True)
class Joined:
    """The language pairs of a source, and those of a corpus that the source lacks.

    Attributes:
        source: Source, or a function that makes it.
        corpus: Folder of a tokenized corpus (MODEL_DIR/data/<fingerprint>), whose text is read.
    """

    source: Source | Callable[[], Source]
    corpus: str

    @cached_property
    def _new(self) -> Source:
        return self.source() if callable(self.source) else self.source

    @cached_property
    def _old(self) -> Cache:
        return Cache(self.corpus)

    @property
    def reading(self) -> Any:
        """Origins and bad lines of the new source; for the corpus, those of its text."""
        return self._new.reading  # type: ignore[attr-defined]

    def language_pairs(self) -> list[str]:
        """Returns the source's language pairs, then the corpus's others."""
        return list(dict.fromkeys([*self._new.language_pairs(), *self._old.language_pairs()]))

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the pairs of two languages. Raises InputError if neither has them."""
        if (pair := pair_of(pair)) not in self.language_pairs():
            there = ", ".join(self.language_pairs())
            raise InputError(f"no {pair}; there is {there} (Joined.source, Joined.corpus)")
        if self._is_new(pair):
            yield from self._new.pairs(pair, split)
            return
        reading, name = getattr(self._new, "reading", None), f"{split}.{key_of(pair)}.tsv"
        for number, texts in enumerate(self._old.pairs(pair, split), 1):
            if reading is not None:
                reading.origin = (name, number)
            yield texts

    def subsets(self, pair: str, split: str) -> dict[str, list[bool]]:
        """Returns the named subsets of a split."""
        if not self._is_new(pair):
            return self._old.subsets(pair, split)
        subsets = getattr(self._new, "subsets", None)
        return {} if subsets is None else subsets(pair, split)

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the source, and the text of the corpus's other pairs."""
        new, old = self._new.identity(), self._old.identity()["by_pair"]
        others = {pair: text for pair, text in old.items() if not self._is_new(pair)}
        by_pair = {**others, **new.pop("by_pair", {})}
        return {"source": "joined", "new": new, "by_pair": by_pair}

    def _is_new(self, pair: str) -> bool:
        return pair in self._new.language_pairs()

"""A source and, for its other languages, the corpus of an older model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from m4.data.cache.cache import Cache
from m4.data.sources import Pair, Source
from m4.settings import InputError, checked


@checked
@dataclass(frozen=True)
class Joined:
    """The languages of a source, and of a corpus those that the source does not have.

    Attributes:
        source: Of the new languages.
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
        """The source's; origins in the corpus are lines of its text."""
        return self._new.reading  # type: ignore[attr-defined]

    def languages(self) -> list[str]:
        """Returns the source's, then the others of the corpus."""
        return list(dict.fromkeys([*self._new.languages(), *self._old.languages()]))

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        """Yields the pairs of a language, all of one of the two. InputError: none has it."""
        if language not in self.languages():
            there = ", ".join(self.languages())
            raise InputError(f"no {language!r}; there is {there} (Joined.source, Joined.corpus)")
        if self._is_new(language):
            yield from self._new.pairs(language, split)
            return
        reading, name = getattr(self._new, "reading", None), f"{split}.{language}.tsv"
        for number, pair in enumerate(self._old.pairs(language, split), 1):
            if reading is not None:
                reading.origin = (name, number)
            yield pair

    def subsets(self, language: str, split: str) -> dict[str, list[bool]]:
        """Returns the named parts of a split."""
        if not self._is_new(language):
            return self._old.subsets(language, split)
        subsets = getattr(self._new, "subsets", None)
        return {} if subsets is None else subsets(language, split)

    def identity(self) -> dict[str, Any]:
        """Returns the identity of the source, and the text of the corpus's other languages."""
        new, old = self._new.identity(), self._old.identity()["by_language"]
        others = {code: text for code, text in old.items() if not self._is_new(code)}
        by_language = {**others, **new.pop("by_language", {})}
        return {"source": "joined", "new": new, "by_language": by_language}

    def _is_new(self, language: str) -> bool:
        return language in self._new.languages()

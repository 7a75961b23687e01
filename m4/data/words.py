"""Much text -> ids: a word that was seen before is looked up and not tokenized again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.vocabulary import SPACE, Vocabulary

# About 40 MB, and the processor's caches still help. Beyond it everything is forgotten: the common
# words are soon known again.
MOST_WORDS = 200_000


class Ragged(NamedTuple):
    """Rows of different lengths: all ids one after another, and the number of each row's."""

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.integer]) -> Ragged:
        """The rows of these numbers, in that order."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        starts = (np.cumsum(self.lengths) - self.lengths)[rows]
        # Of every id: its place in the row, counted from where the row is in self.ids.
        index = np.arange(lengths.sum()) + np.repeat(starts - ends + lengths, lengths)
        return Ragged(self.ids[index], lengths)

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return Ragged(ids, lengths)

    @staticmethod
    def joined(parts: Sequence[Ragged]) -> Ragged:
        ids, lengths = zip(*parts, strict=True)
        return Ragged(np.concatenate(ids), np.concatenate(lengths))


class WordEncoder:
    """`Vocabulary.encode` for whole corpora: the same ids, several times as fast.

    SentencePiece tokenizes each word of a text by itself, as long as no piece has a space inside.
    A vocabulary that is not so is asked for whole texts; and so it is where a text has the sign
    that SentencePiece writes for a space, whose neighbours are its own affair.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._known = Ragged.of([])

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Texts -> ids, without eos."""
        joined = " ".join(texts)
        if not texts or SPACE in joined or not self.vocabulary.by_words:
            return Ragged.of(self.vocabulary.encode(texts))
        if len(self._numbers) > MOST_WORDS:
            self._forget()
        words = joined.split(" ")
        number = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        if new := self._numbers.new:
            ids = Ragged.of(self.vocabulary.encode(new))
            self._known = Ragged.joined([self._known, ids])
            self._numbers.new = []
        by_word = self._known.take(number)
        words_of = np.fromiter((text.count(" ") + 1 for text in texts), np.int64, len(texts))
        lengths = np.add.reduceat(by_word.lengths, np.cumsum(words_of) - words_of)
        return Ragged(by_word.ids, lengths)


class _Numbers(dict[str, int]):
    """Word -> its number, in the order in which they were first asked for. new: the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        self.new.append(word)
        return number

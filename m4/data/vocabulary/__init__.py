"""Subword vocabularies and tokenization into `Ragged` arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from m4.data.arrays import Integers, Ints


class Ragged(NamedTuple):
    """Rows of ids of different lengths, as concatenated ids with each row's length."""

    ids: Integers
    lengths: Ints

    def take(self, rows: Integers) -> Ragged:
        """Returns the rows with these numbers, in that order."""
        starts = np.cumsum(self.lengths) - self.lengths
        return Ragged.within(self.ids, starts[rows], self.lengths[rows])

    def rows(self) -> list[list[int]]:
        """Returns the ids of each row."""
        parts = np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []
        return [part.tolist() for part in parts]

    @staticmethod
    def within(ids: Integers, starts: Ints, lengths: Ints) -> Ragged:
        """Returns the rows that begin at `starts` in an array of ids."""
        # The position of every id: its position in the row plus the row's start.
        begins = starts - np.cumsum(lengths) + lengths
        return Ragged(ids[np.arange(lengths.sum()) + np.repeat(begins, lengths)], lengths)

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return Ragged(ids, lengths)

    @staticmethod
    def joined(parts: Sequence[Ragged]) -> Ragged:
        ids, lengths = zip(*parts, strict=True)
        return Ragged(np.concatenate(ids), np.concatenate(lengths))

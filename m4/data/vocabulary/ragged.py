"""Many rows of ids in one flat array."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Ragged(NamedTuple):
    """Rows of different lengths: all ids one after another, and the length of each row."""

    ids: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.integer]) -> Ragged:
        """Returns the rows of these numbers, in that order."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        starts = (np.cumsum(self.lengths) - self.lengths)[rows]
        # The place of every id in self.ids: its place in the row, counted from the row's start.
        index = np.arange(lengths.sum()) + np.repeat(starts - ends + lengths, lengths)
        return Ragged(self.ids[index], lengths)

    def rows(self) -> list[list[int]]:
        """Returns the ids of each row."""
        parts = np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []
        return [part.tolist() for part in parts]

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return Ragged(ids, lengths)

    @staticmethod
    def joined(parts: Sequence[Ragged]) -> Ragged:
        ids, lengths = zip(*parts, strict=True)
        return Ragged(np.concatenate(ids), np.concatenate(lengths))

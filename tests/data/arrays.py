"""The ids of a corpus by row: slow and obvious."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from m4.data.cache.cache import Cache
from m4.data.directions import SIDES, split_direction


def tokens(cache: Cache, split: str, side: str, role: str = "source") -> tuple[Any, Any]:
    """(flat ids, offsets) of a side of all pairs, in the order of the rows, way after way."""
    sentences, first = cache.sentences(split, role), cache.first_sentences(split)
    entries = []
    for pair in cache.language_pairs():
        numbers = cache.pair_numbers(split).take(np.array(cache.rows(pair, split), np.int64))
        code = split_direction(pair)[SIDES.index(side)]
        entries += [first[code] + number for number in numbers[:, SIDES.index(side)].tolist()]
    ways = cache.segmentations if split == "train" else 1
    total = sum(cache.manifest["sentences"][split].values())
    every = np.array([entry + way * total for way in range(ways) for entry in entries], np.int64)
    found = sentences.take(every)
    return found.ids, np.concatenate([[0], np.cumsum(found.lengths)])


def rows_of(cache: Cache, split: str, side: str, role: str = "source") -> list[list[int]]:
    """The ids of each row."""
    flat, offsets = tokens(cache, split, side, role)
    return [flat[a:b].tolist() for a, b in pairwise(offsets)]

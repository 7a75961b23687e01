"""The ids of a corpus by row, of its text, and of batches: slow and obvious."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from m4.data.cache.cache import Cache
from m4.data.directions import SIDES, pair_of, sides_of, split_direction
from m4.data.preprocess import tag, trim
from m4.data.stream.batches import Batch, Shape, SplitReader, lay_out


def tokens(cache: Cache, split: str, side: str, role: str = "source") -> tuple[Any, Any]:
    """Returns (flat ids, offsets) of a side of all pairs, in the order of rows, way after way."""
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
    """Returns the ids of each row."""
    flat, offsets = tokens(cache, split, side, role)
    return [flat[a:b].tolist() for a, b in pairwise(offsets)]


# (source ids, target ids) of a pair.
Ids = tuple[tuple[int, ...], tuple[int, ...]]


def of_text(
    cache: Cache, direction: str, split: str, source_length: int = 2000, target_length: int = 2000
) -> list[Ids]:
    """Returns the ids of a direction's pairs, made from their text."""
    pairs, (_, into) = [*cache.pairs(pair_of(direction), split)], split_direction(direction)
    source, target = ([getattr(one, side) for one in pairs] for side in sides_of(direction))
    sources = cache.vocabulary.encode_tagged([tag(text, into) for text in source])
    ids = zip(sources, cache.vocabulary.encode_targets(target), strict=True)
    return [(tuple(trim(s, source_length)), tuple(trim(t, target_length))) for s, t in ids]


def unpacked(cache: Cache, direction: str, split: str) -> Batch:
    """Returns a split as one batch: a row per pair, in order, trimmed to the corpus's lengths."""
    data, shape = SplitReader(cache, [direction], split), (cache.source_length, cache.target_length)
    every = np.arange(data.sizes[0])
    found = data.examples(0 * every, every)
    lengths = map(np.minimum, (found.source_lengths, found.target_lengths), shape)
    found = found._replace(**dict(zip(("source_lengths", "target_lengths"), lengths, strict=True)))
    return lay_out(data, found, every, every, Shape(len(every), *shape))


def pairs_of(batch: Mapping[str, Any]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Returns (direction, source ids, target ids) of every segment of every row, in order."""
    found = []
    for row, segments in enumerate(batch["encoder_segment_ids"]):
        assert segments.max() == batch["decoder_segment_ids"][row].max()
        for segment in range(1, segments.max() + 1):
            source, target = segments == segment, batch["decoder_segment_ids"][row] == segment
            (direction,) = set(batch["direction_ids"][row][target].tolist())
            assert set(batch["encoder_direction_ids"][row][source].tolist()) == {direction}
            ids = tuple(batch["decoder_target_tokens"][row][target].tolist())
            assert batch["decoder_input_tokens"][row][target].tolist() == [0, *ids[:-1]]
            of_source = batch["encoder_input_tokens"][row][source].tolist()
            found.append((direction, tuple(of_source), ids))
    return found


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)

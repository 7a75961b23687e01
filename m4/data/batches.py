"""Pairs laid out in the rows of a batch; and the batches of dev and test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.cache import Cache
from m4.data.packing import Ints, Shape, first_fit_decreasing
from m4.data.preprocess import EOS_ID, split_direction

Batch = dict[str, npt.NDArray[Any]]
# What a source has besides its text, and what a target has.
TAG_IDS, EOS_IDS = 1, 1


class Examples(NamedTuple):
    """K pairs to lay out. Lengths are in ids with tag and eos; start is in the flat arrays."""

    directions: npt.NDArray[Any]
    english_source: npt.NDArray[Any]  # bool
    source_starts: npt.NDArray[Any]
    source_lengths: npt.NDArray[Any]
    target_starts: npt.NDArray[Any]
    target_lengths: npt.NDArray[Any]

    def take(self, index: Any) -> Examples:
        return Examples(*(array[index] for array in self))


class SplitReader:
    """A split's arrays, and the pairs of some directions in it as Examples."""

    def __init__(self, cache: Cache, directions: Sequence[str], split: str) -> None:
        self.english, self.english_offsets = cache.tokens(split, "english")
        self.foreign, self.foreign_offsets = cache.tokens(split, "foreign")
        sides = [split_direction(direction) for direction in directions]
        self.codes = [target if source == "en" else source for source, target in sides]
        rows = [cache.rows(code, split) for code in self.codes]
        self.first_rows = np.array([r.start for r in rows], np.int64)
        self.sizes = [len(r) for r in rows]
        self.english_source = np.array([source == "en" for source, _ in sides])
        self.tags = np.array([cache.vocabulary.tag_id(target) for _, target in sides])

    def examples(self, directions: Ints, indices: Ints) -> Examples:
        row = self.first_rows[directions] + indices
        english = self.english_offsets[row], self.english_offsets[row + 1]
        foreign = self.foreign_offsets[row], self.foreign_offsets[row + 1]
        from_english = self.english_source[directions]
        first, last = (np.where(from_english, e, f) for e, f in zip(english, foreign, strict=True))
        start, stop = (np.where(from_english, f, e) for e, f in zip(english, foreign, strict=True))
        return Examples(
            directions,
            from_english,
            first,
            last - first + TAG_IDS + EOS_IDS,
            start,
            stop - start + EOS_IDS,
        )


def lay_out(
    examples: Examples,
    row_of: Ints,
    rows: int,
    source_length: int,
    target_length: int,
    english: npt.NDArray[Any],
    foreign: npt.NDArray[Any],
    tags: Ints,
) -> Batch:
    """Pairs and their rows -> a batch.

    english and foreign are flat ids; tags [directions] is the id in front of a source. Returns
    encoder_input_tokens, encoder_segment_ids, encoder_positions, encoder_direction_ids [B, L];
    decoder_input_tokens (targets moved right inside each segment, 0 first),
    decoder_target_tokens, decoder_loss_weights (float32), decoder_segment_ids, decoder_positions,
    direction_ids [B, T]. Segments count from 1 in each row; 0 is padding everywhere (also where
    directions count from 0: the segments tell).
    """
    order = np.argsort(row_of, kind="stable")
    examples, row_of = examples.take(order), row_of[order]
    first_of_row = np.searchsorted(row_of, row_of)
    segments = np.arange(len(row_of)) - first_of_row + 1

    def places(lengths: Ints, width: int) -> tuple[Ints, Ints, Ints]:
        """Of every token: its example, its position in it, its place in the flat [B * width]."""
        before = np.cumsum(lengths) - lengths
        example = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(example)) - before[example]
        start = row_of * width + before - before[first_of_row]
        return example, position, start[example] + position

    def filled(width: int, place: Ints, values: Any, dtype: Any = np.int32) -> npt.NDArray[Any]:
        array = np.zeros(rows * width, dtype)
        array[place] = values
        return array.reshape(rows, width)

    def tokens(is_english: npt.NDArray[np.bool_], starts: Ints, example: Ints, position: Ints):
        """The id of every token that is in the flat arrays; others read a neighbour, unused."""
        index = starts[example] + position
        from_english = is_english[example]
        values = np.empty(len(index), np.int32)
        for flat, chosen in ((english, from_english), (foreign, ~from_english)):
            inside = index[chosen]
            values[chosen] = flat[np.clip(inside, 0, len(flat) - 1)] if len(inside) else 0
        return values

    example, position, place = places(examples.source_lengths, source_length)
    last = position == examples.source_lengths[example] - 1
    source = tokens(examples.english_source, examples.source_starts - 1, example, position)
    source[position == 0] = tags[examples.directions]
    source[last] = EOS_ID
    batch: Batch = {
        "encoder_input_tokens": filled(source_length, place, source),
        "encoder_segment_ids": filled(source_length, place, segments[example]),
        "encoder_positions": filled(source_length, place, position),
        "encoder_direction_ids": filled(source_length, place, examples.directions[example]),
    }
    example, position, place = places(examples.target_lengths, target_length)
    target = tokens(~examples.english_source, examples.target_starts, example, position)
    target[position == examples.target_lengths[example] - 1] = EOS_ID
    shifted = np.concatenate([np.zeros(1, np.int32), target])[: len(target)]
    return batch | {
        "decoder_input_tokens": filled(target_length, place, np.where(position == 0, 0, shifted)),
        "decoder_target_tokens": filled(target_length, place, target),
        "decoder_loss_weights": filled(target_length, place, 1.0, np.float32),
        "decoder_segment_ids": filled(target_length, place, segments[example]),
        "decoder_positions": filled(target_length, place, position),
        "direction_ids": filled(target_length, place, examples.directions[example]),
    }


def evaluation_batches(
    cache: Cache,
    directions: str | Sequence[str],
    split: str,
    batch_rows: int,
    source_length: int | None = None,
    target_length: int | None = None,
    length_multiple: int | None = None,
    pack: bool = False,
    limit: int | None = None,
) -> Iterator[Batch]:
    """The pairs of a split once, in order, in batches of `batch_rows` rows.

    The last batch is filled up with empty rows (segment 0, weight 0). Longer pairs are trimmed
    to the lengths, which default to the cache's. With length_multiple each batch is as wide as
    its longest pair needs, rounded up to a multiple. direction_ids count in `directions`. limit
    takes the first pairs of each direction only. With pack=True several pairs share a row, in an
    order that is not that of the split: for losses, not for decoding.
    """
    names = [directions] if isinstance(directions, str) else list(directions)
    widest = (source_length or cache.source_length, target_length or cache.target_length)
    data = SplitReader(cache, names, split)
    for code, size in zip(data.codes, data.sizes, strict=True):
        if not size:
            raise ValueError(f"{cache.folder}: language {code!r} has no {split} pairs")
    counts = [min(size, limit or size) for size in data.sizes]
    examples = data.examples(
        np.repeat(np.arange(len(names)), counts),
        np.concatenate([np.arange(count) for count in counts]),
    )
    examples = examples._replace(
        source_lengths=np.minimum(examples.source_lengths, widest[0]),
        target_lengths=np.minimum(examples.target_lengths, widest[1]),
    )
    for chosen, rows in _rows_in_order(examples, batch_rows, widest, pack):
        part = examples.take(chosen)
        source, target = widest
        if length_multiple is not None:
            source = _rounded(rows, part.source_lengths, length_multiple, source)
            target = _rounded(rows, part.target_lengths, length_multiple, target)
        yield lay_out(part, rows, batch_rows, source, target, data.english, data.foreign, data.tags)


def _rows_in_order(
    examples: Examples, batch_rows: int, widths: tuple[int, int], pack: bool
) -> Iterator[tuple[npt.NDArray[np.int64], Ints]]:
    """(indices of the pairs, their rows) of one batch after another."""
    left = np.arange(len(examples.directions))
    while left.size:
        if not pack:
            yield left[:batch_rows], np.arange(len(left[:batch_rows]))
            left = left[batch_rows:]
            continue
        source, target = examples.source_lengths[left], examples.target_lengths[left]
        load = np.maximum(np.cumsum(source) / widths[0], np.cumsum(target) / widths[1])
        stop = max(int(np.searchsorted(load, batch_rows, side="right")), 1)
        rows = first_fit_decreasing(source[:stop], target[:stop], Shape(batch_rows, *widths))
        yield left[:stop][rows >= 0], rows[rows >= 0]
        left = np.concatenate([left[:stop][rows < 0], left[stop:]])


def _rounded(rows: Ints, lengths: Ints, multiple: int, most: int) -> int:
    """Ids of the fullest row, rounded up to a multiple, at most `most`."""
    return min(-(-int(np.bincount(rows, lengths).max()) // multiple) * multiple, most)

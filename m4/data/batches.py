"""Rows of a batch: packing by length, and laying tokens out with segments and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.preprocess import EOS_ID

Ints = npt.NDArray[np.int64]
Batch = dict[str, npt.NDArray[Any]]


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


def first_fit_decreasing(
    source_lengths: Ints, target_lengths: Ints, rows: int, source_length: int, target_length: int
) -> Ints:
    """Pairs [K] -> the row of each, -1 for what fits nowhere.

    Longest first, each into the first row that has room for both sides. Source: Johnson 1973,
    in two dimensions as vector bin packing, the size of a pair being its larger share of a row.
    """
    share = np.maximum(source_lengths / source_length, target_lengths / target_length)
    source_room = np.full(rows, source_length)
    target_room = np.full(rows, target_length)
    result = np.full(len(share), -1)
    for i in np.argsort(-share, kind="stable"):
        fits = (source_room >= source_lengths[i]) & (target_room >= target_lengths[i])
        row = fits.argmax()
        if fits[row]:
            result[i] = row
            source_room[row] -= source_lengths[i]
            target_room[row] -= target_lengths[i]
    return result


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
    encoder_input_tokens, encoder_segment_ids, encoder_positions [B, L]; decoder_input_tokens
    (targets moved right inside each segment, 0 first), decoder_target_tokens,
    decoder_loss_weights (float32), decoder_segment_ids, decoder_positions, direction_ids [B, T].
    Segments count from 1 in each row; 0 is padding everywhere.
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

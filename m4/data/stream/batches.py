"""Packing of pairs into rows of batches, their layout, and the batches of dev and test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from m4.data.arrays import Array, Ints
from m4.data.cache.cache import Cache
from m4.data.cache.shards import Damaged, SentenceShards
from m4.data.directions import ROLES, SIDES, pair_of, sides_of, split_direction
from m4.data.preprocess import EOS_ID, PAD_ID
from m4.data.stream import numba_loops
from m4.settings import InputError

Batch = dict[str, Array]
# Names of a batch's arrays, in the order of numba_loops.lay_out's arguments.
ENCODER_KEYS = (
    "encoder_input_tokens",
    "encoder_segment_ids",
    "encoder_positions",
    "encoder_direction_ids",
)
DECODER_KEYS = (
    "decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights", "decoder_segment_ids",
    "decoder_positions", "direction_ids",
)  # fmt: skip
# Loads of a plan's steps to try in turn, in thousandths of an even share.
_HURRIES = (1000, 1005, 1010, 1020, 1050)
TRIES = len(_HURRIES)
# First fit looks at every row, so a step with more rows is packed in separate parts.
_MOST_ROWS = 512


class Shape(NamedTuple):
    """Shape of one batch."""

    rows: int
    source_length: int
    target_length: int


class BatchPlan(NamedTuple):
    """Step and row of each of K pairs; pairs that fit in no row have row -1."""

    step_of: Ints
    row_of: Ints

    @property
    def left(self) -> int:
        """Number of pairs without a row."""
        return int((self.row_of < 0).sum())


class Examples(NamedTuple):
    """K pairs to lay out.

    Lengths include tag and eos (for a `marked` corpus); starts are positions among all ids.
    """

    directions: Ints
    source_starts: Ints
    source_lengths: Ints
    target_starts: Ints
    target_lengths: Ints

    def take(self, index: Any) -> Examples:
        return Examples(*(array[index] for array in self))


class SplitReader:
    """Reader of a split's arrays, which returns the pairs of some directions as Examples.

    A training sentence may have several segmentations (Cache.segmentations); epoch e of its
    direction reads number e mod segmentations.
    """

    def __init__(self, cache: Cache, directions: Sequence[str], split: str) -> None:
        self.folder, self.bounded = cache.folder, cache.bounded
        self._numbers = cache.pair_numbers(split)
        self.sources, self.targets = (cache.sentences(split, role) for role in ROLES)
        self.pairs = [pair_of(direction) for direction in directions]
        rows = [cache.rows(pair, split) for pair in self.pairs]
        self.first_rows = np.array([r.start for r in rows], np.int64)
        self.sizes = [len(r) for r in rows]
        self._forward = np.array([sides_of(direction) == SIDES for direction in directions])
        first, languages = cache.first_sentences(split), [*map(split_direction, directions)]
        self._first = np.array([[first[code] for code in codes] for codes in languages], np.int64)
        vocabulary, self.marked = cache.source_vocabulary, cache.marked
        tags = [vocabulary.tag_id(to) if self.marked else PAD_ID for _, to in languages]
        self.tags = np.array(tags, np.int32)
        self.extra = cache.extra_ids
        self.ways = cache.segmentations if split == "train" else 1
        self._sentences = sum(cache.manifest["sentences"][split].values())

    def examples(self, directions: Ints, indices: Ints, epochs: Ints | None = None) -> Examples:
        """Returns the pairs `indices` of their directions, segmented by epoch (default: 0)."""
        sources, targets = self._entries(directions, indices, epochs)
        of_sources = self.sources.places(sources, self.extra[0])
        return Examples(directions, *of_sources, *self.targets.places(targets, self.extra[1]))

    def fetch(self, directions: Ints, indices: Ints, epochs: Ints) -> None:
        """Fetches the shards of these pairs if the corpus is in a bucket."""
        if self.bounded is not None:
            self.bounded.need(self._numbers.names(self.first_rows[directions] + indices))
            entries = self._entries(directions, indices, epochs)
            names = map(SentenceShards.names, (self.sources, self.targets), entries)
            self.bounded.need(name for of_side in names for name in of_side)

    def _entries(self, directions: Ints, indices: Ints, epochs: Ints | None) -> tuple[Ints, Ints]:
        """Returns the numbers of sources and targets among the split's sentences."""
        numbers = self._numbers.take(self.first_rows[directions] + indices)
        sources, targets = numba_loops.entries(directions, numbers, self._forward, self._first)
        if epochs is not None and self.ways > 1:
            way = epochs % self.ways * self._sentences
            sources, targets = sources + way, targets + way
        return sources, targets

    def release(self) -> None:
        """Releases the read pages of files (`shards.release`)."""
        for one in (self._numbers, self.sources, self.targets):
            one.release()


def plan(
    source_lengths: Ints, target_lengths: Ints, directions: Ints, epochs: Ints, steps: int,
    shape: Shape, tries: int = TRIES,
) -> BatchPlan:  # fmt: skip
    """Plans steps of similar load for pairs in the order of their draws.

    Each step takes the next pairs up to its share of the remaining load, or fewer if they do not
    pack (`first_fit_decreasing`). Gaps then go to later pairs, the largest first, up to that share,
    but only to pairs of their direction's present epoch, so that after every step each pair of a
    direction was seen once before any was seen twice. If pairs remain in the end, all steps are
    planned again with a slightly larger share, which leaves more room for the last steps. Lengths,
    directions and epochs are those of [K] pairs, K >= steps * rows.
    """
    assert len(source_lengths) >= steps * shape.rows
    # A step has the fewest equal parts of at most _MOST_ROWS rows, or 1 if there would be many.
    fewest = -(-shape.rows // _MOST_ROWS)
    parts = next((n for n in range(fewest, 2 * fewest + 1) if shape.rows % n == 0), 1)
    rows, number = shape.rows // parts, int(directions.max()) + 1
    made = []
    for hurry in _HURRIES[:tries]:
        part_of, row_of = np.empty_like(source_lengths), np.empty_like(source_lengths)
        room = np.empty(rows, np.int64), np.empty(rows, np.int64)
        left = numba_loops.plan(
            source_lengths, target_lengths, directions, epochs, np.empty(number, np.int64),
            steps * parts, *shape[1:], *room, hurry, part_of, row_of,
        )  # fmt: skip
        made.append((left, part_of, row_of))
        if not left:
            break
    _, part_of, row_of = min(made, key=lambda one: one[0])
    row_of = np.where(row_of < 0, -1, row_of + part_of % parts * rows)
    return BatchPlan(part_of // parts, row_of)


def first_fit_decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Returns [K] rows of pairs, with -1 for pairs that fit in none.

    Pairs, the longest first, go into the first row with room for both sides. Source: Johnson 1973,
    in two dimensions as vector bin packing; the size of a pair is its larger share of a row.
    """
    lengths = source_lengths, target_lengths
    share = numba_loops.shares(*lengths, *shape[1:])
    row_of = np.empty(len(share), np.int64)
    order = numba_loops.decreasing(np.arange(len(share)), share)
    room = [np.full(shape.rows, length) for length in shape[1:]]
    numba_loops.first_fit(order, len(share), *lengths, *room, row_of)
    return row_of


def lay_out(
    data: SplitReader, examples: Examples, chosen: Ints, row_of: Ints, shape: Shape,
    part: tuple[int, int] = (0, 1),
) -> Batch:  # fmt: skip
    """Lays out the chosen pairs in their rows, as a batch or as part i of n equal parts.

    Returns encoder_input_tokens, encoder_segment_ids, encoder_positions, encoder_direction_ids
    [B, L]; decoder_input_tokens (targets moved right inside each segment, 0 first),
    decoder_target_tokens, decoder_loss_weights (float32), decoder_segment_ids, decoder_positions,
    direction_ids [B, T]. Pairs of a row are in the order of `chosen`. Segments count from 1 in each
    row. Padding is 0 everywhere; for directions, which count from 0, the segments tell it.

    Raises:
        InputError: The corpus is damaged: a pair is longer than its row or the arrays.
    """
    number, parts = part
    rows = shape.rows // parts
    if parts > 1:
        chosen = chosen[row_of[chosen] // rows == number]
    source, source_starts = data.sources.flat(*examples[1:3], data.extra[0], chosen)
    target, target_starts = data.targets.flat(*examples[3:5], data.extra[1], chosen)
    batch: Batch = {
        key: np.zeros((rows, width), np.float32 if key == "decoder_loss_weights" else np.int32)
        for keys, width in zip((ENCODER_KEYS, DECODER_KEYS), shape[1:], strict=True)
        for key in keys
    }
    wrong = numba_loops.lay_out(
        chosen, row_of, rows, number * rows, *shape[1:], examples.directions,
        data.marked, data.tags, EOS_ID,
        source_starts, examples.source_lengths, target_starts, examples.target_lengths,
        source, target, *(array.reshape(-1) for array in batch.values()),
    )  # fmt: skip
    if wrong >= 0:
        pair = data.pairs[examples.directions[wrong]]
        raise Damaged(data.folder, f"a pair of {pair!r} is longer than in the manifest")
    return batch


def evaluation_batches(
    cache: Cache, directions: Sequence[str], split: str, shape: Shape, limit: int | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Yields each pair of a split once, in packed batches.

    Pairs stay in order, except that one without room in a batch moves to the next batch. The last
    batch is filled with empty rows (segment 0, weight 0). Pairs longer than a row are trimmed.

    Args:
        directions: Directions, in the order of `direction_ids`.
        limit: Number of first pairs of each direction to take. Defaults to all.

    Raises:
        InputError: Two languages have no pairs in this split.
    """
    data = SplitReader(cache, directions, split)
    for pair, size in zip(data.pairs, data.sizes, strict=True):
        if not size:
            raise InputError(f"{cache.folder}: {pair} has no {split} pairs")
    counts = [min(size, limit or size) for size in data.sizes]
    indices = np.concatenate([*map(np.arange, counts)])
    examples = data.examples(np.repeat(np.arange(len(directions)), counts), indices)
    examples = examples._replace(
        source_lengths=np.minimum(examples.source_lengths, shape.source_length),
        target_lengths=np.minimum(examples.target_lengths, shape.target_length),
    )
    for chosen, rows in _rows_in_order(examples, shape):
        yield lay_out(data, examples.take(chosen), np.arange(len(rows)), rows, shape)


def _rows_in_order(examples: Examples, shape: Shape) -> Iterator[tuple[Ints, Ints]]:
    """Yields (indices of pairs, their rows) for each batch."""
    most, *widths = shape
    left = np.arange(len(examples.directions))
    while left.size:
        source, target = examples.source_lengths[left], examples.target_lengths[left]
        load = np.maximum(np.cumsum(source) / widths[0], np.cumsum(target) / widths[1])
        stop = max(int(np.searchsorted(load, most, side="right")), 1)
        rows = first_fit_decreasing(source[:stop], target[:stop], shape)
        yield left[:stop][rows >= 0], rows[rows >= 0]
        left = np.concatenate([left[:stop][rows < 0], left[stop:]])

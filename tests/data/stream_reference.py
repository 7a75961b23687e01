"""The loops of m4/data/stream/numba_loops.py in plain numpy and Python: slow and obvious."""

import itertools
from typing import Any

import numpy as np

from m4.data import permutation
from m4.data.preprocess import EOS_ID
from m4.data.stream.batches import (
    DECODER_KEYS,
    ENCODER_KEYS,
    Batch,
    Examples,
    Ints,
    Shape,
    SplitReader,
)

_ALL = 1 << 64


def mix(x: int) -> int:
    """Returns `permutation.mix` of a number of Python."""
    x = (x + int(permutation.GOLDEN)) % _ALL
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _ALL
    return x ^ x >> 31


def permute(index: int, size: int, key: int) -> int:
    """Returns the permuted place of a number, by a Feistel network repeated until it is < size."""
    x, bits = index, max((size - 1).bit_length(), 2)
    while True:
        right_bits, left_bits = bits // 2, bits - bits // 2
        for number in range(4):
            left, right = x >> right_bits, x % (1 << right_bits)
            noise = mix(mix(right + (number << 56)) ^ key)
            x = right << left_bits | left ^ noise % (1 << left_bits)
            left_bits, right_bits = right_bits, left_bits
        if x < size:
            return x


def occurrences(directions: Ints, before: Ints) -> Ints:
    """Returns the rank of each draw among those of its direction, by a stable sort."""
    together = np.argsort(directions, kind="stable")
    starts = np.searchsorted(directions[together], np.arange(len(before)))
    rank = np.empty(len(directions), np.int64)
    rank[together] = np.arange(len(directions)) - starts[directions[together]]
    return rank + before[directions]


def examples(
    directions: Ints, occurrence: Ints, sizes: Any, keys: Any, window: int
) -> tuple[Ints, Ints]:
    """Returns (pairs within their directions, epochs), one by one."""
    found, epochs = [], []
    for direction, number in zip(directions.tolist(), occurrence.tolist(), strict=True):
        size = int(sizes[direction])
        epoch, index = divmod(number, size)
        key = mix(int(keys[direction]) ^ mix(epoch))
        epochs.append(epoch)
        if size <= window:
            found.append(permute(index, size, key))
            continue
        place, inside = divmod(index, window)
        within = window if place < size // window else size % window
        place = permute(place, size // window, mix(key)) if within == window else place
        inside = permute(inside, within, mix(key ^ mix(place)))
        found.append((place * window + inside + mix(_ALL - 1 - key) % size) % size)
    return np.array(found), np.array(epochs)


def decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Returns the pairs in decreasing order of their larger share of a row."""
    share: Any = np.maximum(
        source_lengths / shape.source_length, target_lengths / shape.target_length
    )
    return np.argsort(-share, kind="stable")


def room_of(shape: Shape) -> Ints:
    """Returns [rows, 2]: the room of empty rows for both sides."""
    return np.tile(shape[1:], (shape.rows, 1))


def first_row(lengths: Ints, room: Ints) -> int:
    """Takes room for both sides in the first row that has it; returns the row or -1."""
    fits = (room >= lengths).all(axis=1)
    if not fits.any():
        return -1
    room[fits.argmax()] -= lengths
    return int(fits.argmax())


def first_fit_decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Returns the row of each of [K] pairs, or -1 for those that fit in none."""
    lengths, room = np.stack([source_lengths, target_lengths], axis=1), room_of(shape)
    result = np.empty(len(lengths), np.int64)
    for i in decreasing(source_lengths, target_lengths, shape):
        result[i] = first_row(lengths[i], room)
    return result


def plan(
    source_lengths: Ints,
    target_lengths: Ints,
    directions: Ints,
    epochs: Ints,
    steps: int,
    shape: Shape,
    hurry: int = 1000,
) -> tuple[Ints, Ints]:
    """Returns (step, row) of each pair, with row -1 if it fits in none; see batches.plan."""
    pairs, lengths = len(source_lengths), np.stack([source_lengths, target_lengths], axis=1)
    load = source_lengths * shape.target_length + target_lengths * shape.source_length
    step_of, row_of = np.full(pairs, steps - 1), np.full(pairs, -1)
    waiting = list(range(pairs))

    def pack(members: list[int]) -> Ints:
        return first_fit_decreasing(source_lengths[members], target_lengths[members], shape)

    for step in range(steps - 1):
        later = steps - 1 - step
        budget = sum(int(load[k]) for k in waiting) * hurry // (1000 * (later + 1))
        most = len(waiting) - shape.rows * later
        count = shape.rows
        while count < most and load[waiting[: count + 1]].sum() <= budget:
            count += 1
        window = waiting[: 2 * count]
        while (left := int((pack(window[:count]) < 0).sum())) > 0:
            count -= left
        chosen, ahead = window[:count], window[count:]
        rows = dict(zip(chosen, pack(chosen).tolist(), strict=True))
        room = room_of(shape)
        for k, row in rows.items():
            room[row] -= lengths[k]
        order = decreasing(source_lengths[ahead], target_lengths[ahead], shape)
        for k in [ahead[i] for i in order]:
            first = next(other for other in ahead if directions[other] == directions[k])
            taken = load[list(rows)].sum() + load[k]
            if len(rows) < most and epochs[k] == epochs[first] and taken <= budget:
                row = first_row(lengths[k], room)
                rows |= {k: row} if row >= 0 else {}
        for k, row in rows.items():
            step_of[k], row_of[k] = step, row
        waiting = [k for k in waiting if k not in rows]
    row_of[waiting] = pack(waiting)
    return step_of, row_of


def lay_out(
    data: SplitReader, examples: Examples, chosen: Ints, row_of: Ints, shape: Shape
) -> Batch:
    """Returns a batch of pairs in their rows, laid out token by token; see batches.lay_out."""
    encoder = np.zeros((4, shape.rows, shape.source_length), np.int32)
    decoder = np.zeros((6, shape.rows, shape.target_length), np.int32)
    used = np.zeros((3, shape.rows), int)  # source places, target places, segments
    # All ids of the split, one sentence after another.
    flat = [of.take(np.arange(len(of))).ids.tolist() for of in (data.sources, data.targets)]
    for k in chosen:
        row, (direction, *places) = row_of[k], (array[k] for array in examples)
        used[2, row] += 1
        source, target = (
            ids[start : start + length - extra]
            for ids, start, length, extra in zip(
                flat, places[::2], places[1::2], data.extra, strict=True
            )
        )
        if data.marked:
            source, target = [data.tags[direction], *source, EOS_ID], [*target, EOS_ID]
        for position, token in enumerate(source):
            encoder[:, row, used[0, row]] = token, used[2, row], position, direction
            used[0, row] += 1
        for position, (before, token) in enumerate(itertools.pairwise([0, *target])):
            decoder[:, row, used[1, row]] = before, token, 1, used[2, row], position, direction
            used[1, row] += 1
    batch: Batch = dict(zip((*ENCODER_KEYS, *DECODER_KEYS), (*encoder, *decoder), strict=True))
    batch["decoder_loss_weights"] = batch["decoder_loss_weights"].astype(np.float32)
    return batch

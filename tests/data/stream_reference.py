"""The loops of m4/data/stream/numba_loops.py in plain numpy and Python: slow and obvious."""

from __future__ import annotations

from typing import Any

import numpy as np

from m4.data import permutation
from m4.data.cache.shards import SentenceShards
from m4.data.preprocess import EOS_ID
from m4.data.stream.batches import DECODER_KEYS, ENCODER_KEYS, Batch, Examples, SplitReader
from m4.data.stream.packing import Ints, Shape

_ALL = 1 << 64


def mix(x: int) -> int:
    """`permutation.mix` of one of Python's own numbers."""
    x = (x + int(permutation.GOLDEN)) % _ALL
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _ALL
    return x ^ x >> 31


def permute(index: int, size: int, key: int) -> int:
    """The place of a number below `size`: a Feistel network, walked until it is below `size`."""
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
    """The rank of each draw among those of its direction: a stable sort puts them together."""
    together = np.argsort(directions, kind="stable")
    starts = np.searchsorted(directions[together], np.arange(len(before)))
    rank = np.empty(len(directions), np.int64)
    rank[together] = np.arange(len(directions)) - starts[directions[together]]
    return rank + before[directions]


def examples(
    directions: Ints, occurrence: Ints, sizes: Any, keys: Any, window: int
) -> tuple[Ints, Ints]:
    """(pairs within their directions, epochs), one by one."""
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
    """The pairs by their larger share of a row."""
    share: Any = np.maximum(
        source_lengths / shape.source_length, target_lengths / shape.target_length
    )
    return np.argsort(-share, kind="stable")


def first_fit_decreasing(source_lengths: Ints, target_lengths: Ints, shape: Shape) -> Ints:
    """Pairs [K] -> the row of each, -1 for what fits in none."""
    source_room = np.full(shape.rows, shape.source_length)
    target_room = np.full(shape.rows, shape.target_length)
    result = np.full(len(source_lengths), -1)
    for i in decreasing(source_lengths, target_lengths, shape):
        fits = (source_room >= source_lengths[i]) & (target_room >= target_lengths[i])
        row = fits.argmax()
        if fits[row]:
            result[i] = row
            source_room[row] -= source_lengths[i]
            target_room[row] -= target_lengths[i]
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
    """(step, row) of each pair, row -1 for what fits in none; see packing.plan."""
    pairs = len(source_lengths)
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
        source_room = np.full(shape.rows, shape.source_length)
        target_room = np.full(shape.rows, shape.target_length)
        for k, row in rows.items():
            source_room[row] -= source_lengths[k]
            target_room[row] -= target_lengths[k]
        order = decreasing(source_lengths[ahead], target_lengths[ahead], shape)
        for k in [ahead[i] for i in order]:
            first = next(other for other in ahead if directions[other] == directions[k])
            fits = (source_room >= source_lengths[k]) & (target_room >= target_lengths[k])
            taken = load[list(rows)].sum() + load[k]
            if len(rows) < most and epochs[k] == epochs[first] and fits.any() and taken <= budget:
                rows[k] = int(fits.argmax())
                source_room[rows[k]] -= source_lengths[k]
                target_room[rows[k]] -= target_lengths[k]
        for k, row in rows.items():
            step_of[k], row_of[k] = step, row
        waiting = [k for k in waiting if k not in rows]
    row_of[waiting] = pack(waiting)
    return step_of, row_of


def ids_of(sentences: SentenceShards) -> list[int]:
    """All ids of a split, one sentence after another."""
    return sentences.take(np.arange(len(sentences))).ids.tolist()


def lay_out(
    data: SplitReader, examples: Examples, chosen: Ints, row_of: Ints, shape: Shape
) -> Batch:
    """Pairs and their rows -> a batch, see batches.lay_out; token by token."""
    encoder = np.zeros((4, shape.rows, shape.source_length), np.int32)
    decoder = np.zeros((6, shape.rows, shape.target_length), np.int32)
    used = np.zeros((3, shape.rows), int)  # source places, target places, segments
    for k in chosen:
        row, direction = row_of[k], examples.directions[k]
        used[2, row] += 1
        start, length = examples.source_starts[k], examples.source_lengths[k]
        ids = [*ids_of(data.sources)[start : start + length]]
        if data.marked:
            ids = [data.tags[direction], *ids[: length - 2], EOS_ID]
        for position, token in enumerate(ids):
            encoder[:, row, used[0, row]] = token, used[2, row], position, direction
            used[0, row] += 1
        start, length = examples.target_starts[k], examples.target_lengths[k]
        ids = [*ids_of(data.targets)[start : start + length]]
        if data.marked:
            ids = [*ids[: length - 1], EOS_ID]
        for position, token in enumerate(ids):
            before = ids[position - 1] if position else 0
            decoder[:, row, used[1, row]] = before, token, 1, used[2, row], position, direction
            used[1, row] += 1
    batch: Batch = {**dict(zip(ENCODER_KEYS, encoder, strict=True))}
    batch |= dict(zip(DECODER_KEYS, decoder, strict=True))
    batch["decoder_loss_weights"] = batch["decoder_loss_weights"].astype(np.float32)
    return batch

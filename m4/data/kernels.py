"""The stream's loops over pairs, compiled by numba: drawing, packing, laying out.

All of them in one file: numba's cache on disk looks at a function's own file only, and a change of
what a compiled function calls in another file would go unnoticed. Constants of other files come as
arguments for the same reason. tests/data/stream_reference.py says the same in plain numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Gaps of a step are filled from so many times as many pairs as it has.
AHEAD = 1


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first called, and kept beside the file or in the user's cache folder."""
    # nogil: meanwhile other threads go on, training among them.
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # nowhere to write, as in a container without a home: compiled every time
        return numba.njit(nogil=True)(function)


@_compiled
def mix(x):
    """64 bits -> 64 bits: permutation.mix of one number."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_compiled
def permute(index, size, key):
    """permutation.permute of one number."""
    bits, last = np.uint64(0), size - np.uint64(1)
    while last > np.uint64(0):
        last = last >> np.uint64(1)
        bits += np.uint64(1)
    bits = max(bits, np.uint64(2))
    one, x = np.uint64(1), index
    while True:
        right_bits = bits >> one
        left_bits = bits - right_bits
        for number in range(4):
            left, right = x >> right_bits, x & ((one << right_bits) - one)
            noise = mix(mix(right + (np.uint64(number) << np.uint64(56))) ^ key)
            x = (right << left_bits) | (left ^ (noise & ((one << left_bits) - one)))
            left_bits, right_bits = right_bits, left_bits
        if x < size:
            return x


@_compiled
def occurrences(directions, before):
    """[K] directions in the order of their draws, [D] draws of each before -> [K] draws of a pair's
    own direction before it."""
    counts = before.copy()
    result = np.empty(len(directions), np.int64)
    for k in range(len(directions)):
        direction = directions[k]
        result[k] = counts[direction]
        counts[direction] += 1
    return result


@_compiled
def examples(directions, occurrence, sizes, keys):
    """[K] draws -> [K] pairs within their directions, [K] epochs. sizes, keys [D]: uint64."""
    found = np.empty(len(directions), np.int64)
    epochs = np.empty(len(directions), np.int64)
    for k in range(len(directions)):
        size = sizes[directions[k]]
        epoch = np.uint64(occurrence[k]) // size
        key = mix(keys[directions[k]] ^ mix(epoch))
        found[k] = np.int64(permute(np.uint64(occurrence[k]) % size, size, key))
        epochs[k] = np.int64(epoch)
    return found, epochs


@_compiled
def places(
    directions, entries, english_source, source_extra, target_extra,
    source_english, source_foreign, target_english, target_foreign,
):  # fmt: skip
    """[K] entries of the arrays -> (source starts, source lengths, target starts, target lengths).

    The last four are offsets, of a side in a role. extra: ids that are not in the arrays.
    """
    pairs = len(entries)
    source_starts, source_lengths = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    target_starts, target_lengths = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    for k in range(pairs):
        entry = entries[k]
        if english_source[directions[k]]:
            start, stop = source_english[entry], source_english[entry + 1]
            first, last = target_foreign[entry], target_foreign[entry + 1]
        else:
            start, stop = source_foreign[entry], source_foreign[entry + 1]
            first, last = target_english[entry], target_english[entry + 1]
        source_starts[k], source_lengths[k] = start, stop - start + source_extra
        target_starts[k], target_lengths[k] = first, last - first + target_extra
    return source_starts, source_lengths, target_starts, target_lengths


@_compiled
def shares(source_lengths, target_lengths, source_length, target_length):
    """[K] the larger share of a row that each pair takes, as a whole number of equal parts."""
    divisor, rest = source_length, target_length
    while rest:
        divisor, rest = rest, divisor % rest
    result = np.empty(len(source_lengths), np.int64)
    for k in range(len(result)):
        source, target = source_lengths[k] * target_length, target_lengths[k] * source_length
        result[k] = max(source, target) // divisor
    return result


@_compiled
def decreasing(members, share):
    """members by share[member], the largest first, equal ones in their order."""
    most = 0
    for k in members:
        most = max(most, share[k])
    if most > 16 * len(members) + 1024:
        return members[np.argsort(-share[members], kind="mergesort")]
    # A counting sort, the quickest for few different shares: places[i] is where share most - i is.
    places = np.zeros(most + 2, np.int64)
    for k in members:
        places[most - share[k] + 1] += 1
    for i in range(most):
        places[i + 1] += places[i]
    result = np.empty(len(members), np.int64)
    for k in members:
        result[places[most - share[k]]] = k
        places[most - share[k]] += 1
    return result


@_compiled
def first_row(source, target, source_room, target_room):
    """The first row with room for both sides, which is taken; -1 where there is none."""
    for row in range(len(source_room)):
        if source_room[row] >= source and target_room[row] >= target:
            source_room[row] -= source
            target_room[row] -= target
            return row
    return -1


@_compiled
def first_fit(order, source_lengths, target_lengths, source_room, target_room, row_of):
    """Pairs in `order`, each into the first row with room for both sides; writes row_of (-1 where
    there is none) and the room that is left. Returns how many fit nowhere."""
    left = 0
    for k in order:
        row_of[k] = first_row(source_lengths[k], target_lengths[k], source_room, target_room)
        left += row_of[k] < 0
    return left


@_compiled
def plan(
    source_lengths, target_lengths, directions, epochs, number_of_directions,
    steps, rows, source_length, target_length, hurry,
):  # fmt: skip
    """(step_of [K], row_of [K], pairs that fit nowhere); see packing.plan."""
    pairs = len(source_lengths)
    step_of, row_of = np.full(pairs, steps - 1), np.full(pairs, -1)
    load = source_lengths * target_length + target_lengths * source_length
    load_left = load.sum()
    share = shares(source_lengths, target_lengths, source_length, target_length)
    # The pairs that have no place yet are waiting[head:], in the order of their draws.
    waiting, head = np.arange(pairs), 0
    source_room, target_room = np.empty(rows, np.int64), np.empty(rows, np.int64)
    epoch_of = np.empty(number_of_directions, np.int64)
    for step in range(steps - 1):
        later = steps - 1 - step
        budget = load_left * hurry // (1000 * (later + 1))
        # As many pairs as there are rows always fit; so many are left for every later step.
        most = pairs - head - rows * later
        count, taken = 0, 0
        while count < most and (count < rows or taken + load[waiting[head + count]] <= budget):
            taken += load[waiting[head + count]]
            count += 1
        end = min(head + count * (1 + AHEAD), pairs)
        window = decreasing(waiting[head:end], share)
        while True:
            cut = waiting[head + count] if head + count < pairs else pairs
            source_room[:], target_room[:] = source_length, target_length
            stretch = window[window < cut]
            left = first_fit(
                stretch, source_lengths, target_lengths, source_room, target_room, row_of
            )
            if left == 0:
                break
            row_of[stretch] = -1
            count -= left  # the last ones wait
        # The gaps go to later pairs, the largest first, where that brings no epoch forward.
        taken = load[stretch].sum()
        for w in range(end - 1, head + count - 1, -1):
            epoch_of[directions[waiting[w]]] = epochs[waiting[w]]
        source_most, target_most = source_room.max(), target_room.max()
        for k in window:
            if count == most:
                break
            if (
                k >= cut
                and taken + load[k] <= budget
                and source_lengths[k] <= source_most
                and target_lengths[k] <= target_most
                and epochs[k] == epoch_of[directions[k]]
            ):
                row_of[k] = first_row(
                    source_lengths[k], target_lengths[k], source_room, target_room
                )
                if row_of[k] >= 0:
                    taken += load[k]
                    count += 1
        load_left -= taken
        # What still waits moves up to the end of the window.
        head = end
        for w in range(end - 1, end - 1 - len(window), -1):
            k = waiting[w]
            if row_of[k] >= 0:
                step_of[k] = step
            else:
                head -= 1
                waiting[head] = k
    window = decreasing(waiting[head:], share)
    source_room[:], target_room[:] = source_length, target_length
    left = first_fit(window, source_lengths, target_lengths, source_room, target_room, row_of)
    return step_of, row_of, left


@_compiled
def fill(array, at, length, value):
    """array[at : at + length] = value"""
    # Unsigned indices: signed ones may count from the end, which the compiler cannot vectorize.
    first = np.uint64(at)
    for j in range(np.uint64(length)):
        array[first + j] = value


@_compiled
def count_up(array, at, length):
    """array[at : at + length] = 0, 1, 2 ..."""
    first = np.uint64(at)
    for j in range(np.uint64(length)):
        array[first + j] = np.int32(j)


@_compiled
def copy(array, at, length, values, start):
    """array[at : at + length] = values[start : start + length]"""
    first, begin = np.uint64(at), np.uint64(start)
    for j in range(np.uint64(length)):
        array[first + j] = values[begin + j]


@_compiled
def lay_out(
    chosen, row_of, rows, first_row, source_width, target_width, directions, english_source,
    tags, eos, source_starts, source_lengths, target_starts, target_lengths,
    source_english, source_foreign, target_english, target_foreign,
    inputs, input_segments, input_positions, input_directions,
    shifted, targets, weights, target_segments, target_positions, target_directions,
):  # fmt: skip
    """Writes the pairs `chosen` whose row is one of `rows` from first_row on into the last ten
    arrays, flat and zero before. See batches.lay_out.

    Returns -1, or the first pair that does not fit or is not in the arrays: nothing outside of them
    is read or written.
    """
    segments = np.zeros(rows, np.int32)
    source_ends, target_ends = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for k in chosen:
        row = row_of[k] - first_row
        if row < 0 or row >= rows:
            continue
        segments[row] += 1
        segment, direction = segments[row], np.int32(directions[k])
        if english_source[direction]:
            source, target = source_english, target_foreign
        else:
            source, target = source_foreign, target_english
        start, length, used = source_starts[k], source_lengths[k], source_ends[row]
        if length < 1 or used + length > source_width:
            return k
        if start < 0 or start + length - 2 > len(source):
            return k
        at = row * source_width + used
        inputs[at] = tags[direction]
        copy(inputs, at + 1, max(length - 2, 0), source, start)
        inputs[at + length - 1] = eos
        fill(input_segments, at, length, segment)
        count_up(input_positions, at, length)
        fill(input_directions, at, length, direction)
        source_ends[row] += length
        start, length, used = target_starts[k], target_lengths[k], target_ends[row]
        if length < 1 or used + length > target_width:
            return k
        if start < 0 or start + length - 1 > len(target):
            return k
        at = row * target_width + used
        copy(targets, at, length - 1, target, start)
        targets[at + length - 1] = eos
        copy(shifted, at + 1, length - 1, target, start)
        fill(weights, at, length, np.float32(1))
        fill(target_segments, at, length, segment)
        count_up(target_positions, at, length)
        fill(target_directions, at, length, direction)
        target_ends[row] += length
    return -1

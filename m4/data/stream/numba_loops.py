"""The stream's loops over pairs, compiled by Numba: drawing, packing and layout.

They are all in one file and get constants of other files as arguments, because Numba's cache does
not see changes elsewhere (`m4.data.compiled`). tests/data/stream_reference.py is their equivalent
in plain numpy.
"""

import numpy as np

from m4.data import permutation
from m4.data.compiled import compiled

# Number of later pairs that may fill a step's gaps, in multiples of its own pairs.
AHEAD = 1


mix = compiled(permutation.mix)  # takes a single number in these loops


@compiled
def permute(index, size, key):
    """Permutes range(size) under `key`; all three are uint64.

    This is a Feistel network of 4 rounds over the fewest bits that hold size - 1, repeated until
    the result is in the range (fewer than 2 rounds on average).
    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 4 and 5.
    It must never change, as corpora and batches depend on it.
    """
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


@compiled
def permute_each(index, size, key):
    """Returns `permute` of [K] numbers."""
    result = np.empty_like(index)
    for k in range(len(index)):
        result[k] = permute(index[k], size, key)
    return result


@compiled
def permute_in_windows(index, size, window, key):
    """Permutes range(size) under `key` so that nearby positions have nearby numbers.

    Windows of consecutive numbers come in a permuted order, each permuted inside, and the remainder
    comes last. All numbers are shifted by a keyed distance, so that the remainder varies.
    """
    if size <= window:
        return permute(index, size, key)
    number, inside, windows = index // window, index % window, size // window
    if number < windows:
        number = permute(number, windows, mix(key))
        inside = permute(inside, window, mix(key ^ mix(number)))
    else:
        inside = permute(inside, size - windows * window, mix(key ^ mix(number)))
    return (number * window + inside + mix(~key) % size) % size


@compiled
def occurrences(directions, before):
    """Returns [K] numbers of each direction's earlier draws, including [D] draws `before`."""
    counts = before.copy()
    result = np.empty(len(directions), np.int64)
    for k in range(len(directions)):
        direction = directions[k]
        result[k] = counts[direction]
        counts[direction] += 1
    return result


@compiled
def examples(directions, occurrence, sizes, keys, window):
    """Returns [K] indices within directions, and [K] epochs; sizes and keys are uint64 [D]."""
    found = np.empty(len(directions), np.int64)
    epochs = np.empty(len(directions), np.int64)
    for k in range(len(directions)):
        size = sizes[directions[k]]
        epoch = np.uint64(occurrence[k]) // size
        key = mix(keys[directions[k]] ^ mix(epoch))
        place = np.uint64(occurrence[k]) % size
        found[k] = np.int64(permute_in_windows(place, size, window, key))
        epochs[k] = np.int64(epoch)
    return found, epochs


@compiled
def entries(directions, numbers, forward, first):
    """Returns the numbers of [K] sources and [K] targets among a split's sentences.

    Args:
        numbers: [K, 2] sentence numbers in the pairs' first and second languages.
        forward: [D] whether a direction's source is its pair's first language.
        first: [D, 2] first sentence of a direction's source and target language.
    """
    sources, targets = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    for k in range(len(numbers)):
        direction = directions[k]
        side = 0 if forward[direction] else 1
        sources[k] = np.int64(numbers[k, side]) + first[direction, 0]
        targets[k] = np.int64(numbers[k, 1 - side]) + first[direction, 1]
    return sources, targets


@compiled
def shares(source_lengths, target_lengths, source_length, target_length):
    """Returns [K] shares of a row that pairs take on their larger side, as integers."""
    divisor, rest = source_length, target_length
    while rest:
        divisor, rest = rest, divisor % rest
    result = np.empty(len(source_lengths), np.int64)
    for k in range(len(result)):
        source, target = source_lengths[k] * target_length, target_lengths[k] * source_length
        result[k] = max(source, target) // divisor
    return result


@compiled
def decreasing(members, share):
    """Sorts members stably by share[member], the largest first."""
    # This is a radix sort from the lowest digit, as shares have few values, mostly of one digit.
    # np.argsort would take longer, and seconds to compile.
    most = np.int64(0)
    for k in members:
        most = max(most, share[k])
    before, after = members, np.empty(len(members), np.int64)
    shift = 0
    while shift == 0 or most >> shift:
        # places[d] is the position of the next member with digit 255 - d, the highest digit first.
        places = np.zeros(257, np.int64)
        for k in before:
            places[256 - (share[k] >> shift & 255)] += 1
        for digit in range(256):
            places[digit + 1] += places[digit]
        for k in before:
            digit = 255 - (share[k] >> shift & 255)
            after[places[digit]] = k
            places[digit] += 1
        before, after = after, np.empty(len(members), np.int64)
        shift += 8
    return before


@compiled
def first_row(source, target, source_room, target_room):
    """Takes room for both sides in the first row that has it; returns the row or -1."""
    for row in range(len(source_room)):
        if source_room[row] >= source and target_room[row] >= target:
            source_room[row] -= source
            target_room[row] -= target
            return row
    return -1


@compiled
def first_fit(order, stop, source_lengths, target_lengths, source_room, target_room, row_of):
    """Puts the pairs of `order` before pair `stop` into the first row with room for both sides.

    It writes row_of (-1 without a row) and the remaining room; it returns how many found no row.
    """
    left = 0
    for k in order:
        row_of[k] = -1
        if k < stop:
            row_of[k] = first_row(source_lengths[k], target_lengths[k], source_room, target_room)
            left += row_of[k] < 0
    return left


@compiled
def fill_gaps(
    window, stop, most, budget, load, directions, epochs, epoch_of,
    source_lengths, target_lengths, source_room, target_room, row_of,
):  # fmt: skip
    """Puts pairs of `window`, from pair `stop` on, into rows with room for both sides.

    It takes at most `most` of them, up to the load `budget`, and only pairs in the epoch `epoch_of`
    of their direction. It returns their load.
    """
    count, taken, source_most, target_most = 0, 0, 0, 0
    for row in range(len(source_room)):
        source_most = max(source_most, source_room[row])
        target_most = max(target_most, target_room[row])
    for k in window:
        if count == most:
            break
        if (
            k >= stop
            and taken + load[k] <= budget
            and source_lengths[k] <= source_most
            and target_lengths[k] <= target_most
            and epochs[k] == epoch_of[directions[k]]
        ):
            row_of[k] = first_row(source_lengths[k], target_lengths[k], source_room, target_room)
            if row_of[k] >= 0:
                taken += load[k]
                count += 1
    return taken


@compiled
def plan(
    source_lengths, target_lengths, directions, epochs, epoch_of, steps,
    source_length, target_length, source_room, target_room, hurry, step_of, row_of,
):  # fmt: skip
    """Writes step_of and row_of [K], and returns the number of pairs without a row.

    See `batches.plan`. `epoch_of`, `source_room` and `target_room` are working memory.
    """
    pairs, rows = len(source_lengths), len(source_room)
    share = shares(source_lengths, target_lengths, source_length, target_length)
    load, load_left = np.empty(pairs, np.int64), 0
    # waiting[head:] are the pairs without a place, in the order of their draws.
    waiting, head = np.arange(pairs), 0
    for k in range(pairs):
        load[k] = source_lengths[k] * target_length + target_lengths[k] * source_length
        load_left += load[k]
    for step in range(steps - 1):
        later = steps - 1 - step
        budget = load_left * hurry // (1000 * (later + 1))
        # One pair always fits in a row, so as many pairs as rows are left for every later step.
        most = pairs - head - rows * later
        count, taken = 0, 0
        while count < most and (count < rows or taken + load[waiting[head + count]] <= budget):
            taken += load[waiting[head + count]]
            count += 1
        end = min(head + count * (1 + AHEAD), pairs)
        window = decreasing(waiting[head:end], share)
        left = 1
        while left:
            stop = waiting[head + count] if head + count < pairs else pairs
            source_room[:], target_room[:] = source_length, target_length
            left = first_fit(
                window, stop, source_lengths, target_lengths, source_room, target_room, row_of
            )
            for _ in range(left):  # the last pairs wait for a later step
                count -= 1
                taken -= load[waiting[head + count]]
        # Later pairs fill the gaps, the largest first, unless that would start an epoch early.
        for w in range(end - 1, head + count - 1, -1):
            epoch_of[directions[waiting[w]]] = epochs[waiting[w]]
        load_left -= taken + fill_gaps(
            window, stop, most - count, budget - taken, load, directions, epochs, epoch_of,
            source_lengths, target_lengths, source_room, target_room, row_of,
        )  # fmt: skip
        # Waiting pairs move to the end of the window.
        head = end
        for w in range(end - 1, end - 1 - len(window), -1):
            k = waiting[w]
            if row_of[k] >= 0:
                step_of[k] = step
            else:
                head -= 1
                waiting[head] = k
    for w in range(head, pairs):
        step_of[waiting[w]] = steps - 1
    window = decreasing(waiting[head:], share)
    source_room[:], target_room[:] = source_length, target_length
    return first_fit(
        window, pairs, source_lengths, target_lengths, source_room, target_room, row_of
    )


@compiled
def fill(array, at, length, value):
    """Sets array[at : at + length] to a value."""
    # Signed indices may count from the end, which the compiler cannot vectorize.
    first = np.uint64(at)
    for j in range(np.uint64(length)):
        array[first + j] = value


@compiled
def count_up(array, at, length):
    """Sets array[at : at + length] to 0, 1, 2 ..."""
    first = np.uint64(at)
    for j in range(np.uint64(length)):
        array[first + j] = np.int32(j)


@compiled
def copy(array, at, length, values, start):
    """Copies values[start : start + length] to array[at : at + length]."""
    first, begin = np.uint64(at), np.uint64(start)
    for j in range(np.uint64(length)):
        array[first + j] = values[begin + j]


@compiled
def lay_out(
    chosen, row_of, rows, first_row, source_width, target_width, directions,
    marked, tags, eos, source_starts, source_lengths, target_starts, target_lengths,
    source, target,
    inputs, input_segments, input_positions, input_directions,
    shifted, targets, weights, target_segments, target_positions, target_directions,
):  # fmt: skip
    """Writes the chosen pairs of `rows` rows, from `first_row` on, into the last ten arrays.

    These are flat and initially zero (`batches.lay_out`). Starts refer to `source` and `target`.
    With `marked`, a source gets a tag and both sides get an eos. Returns -1, or the first pair that
    does not fit or is outside `source` and `target`: nothing outside arrays is read or written.
    """
    tag, both = np.int64(marked), 2 * np.int64(marked)
    segments = np.zeros(rows, np.int32)
    source_ends, target_ends = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for k in chosen:
        row = row_of[k] - first_row
        segments[row] += 1
        segment, direction = segments[row], np.int32(directions[k])
        start, length, used = source_starts[k], source_lengths[k], source_ends[row]
        if length < 1 or used + length > source_width:
            return k
        if start < 0 or start + length - both > len(source):
            return k
        at = row * source_width + used
        if marked:
            inputs[at] = tags[direction]
            inputs[at + length - 1] = eos
        copy(inputs, at + tag, max(length - both, 0), source, start)
        fill(input_segments, at, length, segment)
        count_up(input_positions, at, length)
        fill(input_directions, at, length, direction)
        source_ends[row] += length
        start, length, used = target_starts[k], target_lengths[k], target_ends[row]
        if length < 1 or used + length > target_width:
            return k
        if start < 0 or start + length - tag > len(target):
            return k
        at = row * target_width + used
        copy(targets, at, length - tag, target, start)
        if marked:
            targets[at + length - 1] = eos
        copy(shifted, at + 1, length - 1, target, start)
        fill(weights, at, length, np.float32(1))
        fill(target_segments, at, length, segment)
        count_up(target_positions, at, length)
        fill(target_directions, at, length, direction)
        target_ends[row] += length
    return -1

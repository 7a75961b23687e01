"""Length buckets: one pair a row, batches as wide as their pairs need, about equal in tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from m4.data import permutation
from m4.data.stream.packing import BatchPlan, Ints, Shape
from m4.settings import SettingError


def shapes(
    batch_rows: int,
    source_length: int,
    target_length: int,
    widths: Sequence[int] | None = None,
    rows_multiple: int = 8,
) -> list[Shape]:
    """Returns the shapes of the batches, the narrowest first.

    A bucket of width w holds the pairs whose sides have at most w ids. Its number of rows gives it
    as many tokens as `batch_rows` rows of the full lengths have.

    Args:
        batch_rows: Rows of a batch of full lengths.
        widths: Widths below the longer length. Defaults to 1/8, 1/4, 3/8, 1/2 and 3/4 of it,
            rounded up to eights.
        rows_multiple: Rows are rounded down to a multiple of this number.
    """
    longest = max(source_length, target_length)
    if widths is None:
        widths = sorted({-(-longest * part // 64) * 8 for part in (1, 2, 3, 4, 6)})
        widths = [width for width in widths if width < longest]
    if list(widths) != sorted(set(widths)) or any(width < 3 for width in widths):
        raise SettingError("Stream.widths", list(widths), "rising numbers of ids, from 3")
    if batch_rows % rows_multiple:
        allowed = f"a multiple of rows_multiple, {rows_multiple}, with layout 'bucketed'"
        raise SettingError("Stream.batch_rows", batch_rows, allowed)
    made = []
    for width in [*(width for width in widths if width < longest), longest]:
        source, target = min(width, source_length), min(width, target_length)
        rows = batch_rows * (source_length + target_length) // (source + target)
        made.append(Shape(rows // rows_multiple * rows_multiple, source, target))
    return made


def batch_shapes(
    batch_rows: int,
    source_length: int,
    target_length: int,
    layout: str = "packed",
    widths: Sequence[int] | None = None,
    rows_multiple: int = 8,
    **_others: Any,
) -> list[Shape]:
    """Returns the shapes of a stream's batches; a program is compiled for each."""
    whole = Shape(batch_rows, source_length, target_length)
    return shapes(*whole, widths, rows_multiple) if layout == "bucketed" else [whole]


def bucket_of(source_lengths: Ints, target_lengths: Ints, buckets: Sequence[Shape]) -> Ints:
    """Returns [K] narrowest buckets that hold both sides of pairs."""
    source = np.searchsorted([bucket.source_length for bucket in buckets], source_lengths)
    target = np.searchsorted([bucket.target_length for bucket in buckets], target_lengths)
    return np.maximum(source, target)


def plan(bucket: Ints, steps: int, buckets: Sequence[Shape], key: int) -> BatchPlan:
    """Plans steps of pairs whose buckets are given, so that no step is without a pair.

    A bucket's pairs make whole batches. Its left-over pairs make one with empty rows where there
    are enough steps, and go up to the next bucket otherwise. Further steps make more batches with
    empty rows, which a bucket's batches share. The last pairs of the widest bucket have row -1
    where there are not enough steps.

    Args:
        bucket: [K] buckets of pairs in the order of their draws; K >= steps.
        key: Decides the order of the batches.
    """
    bucket = bucket.copy()
    counts = _batches(bucket, steps, buckets)
    step_of, row_of = np.zeros_like(bucket), np.full_like(bucket, -1)
    shape_of: list[Shape] = []
    for number, shape in enumerate(buckets):
        members, batches = np.flatnonzero(bucket == number), counts[number]
        members = members[: batches * shape.rows]
        if not len(members):
            continue
        # Batch i of n holds the pairs i * K // n ... : sizes that differ by 1 at most.
        edges = np.arange(batches + 1) * len(members) // batches
        batch = np.repeat(np.arange(batches), np.diff(edges))
        step_of[members] = len(shape_of) + batch
        row_of[members] = np.arange(len(members)) - edges[batch]
        shape_of += [shape] * batches
    assert len(shape_of) == steps, (counts, steps)
    place = permutation.permutation(steps, key)
    made: list[Shape] = [shape_of[0]] * steps
    for batch, shape in enumerate(shape_of):
        made[place[batch]] = shape
    return BatchPlan(place[step_of], row_of, made)


def _batches(bucket: Ints, steps: int, buckets: Sequence[Shape]) -> list[int]:
    """Returns batches of each bucket, `steps` together; moves pairs that go up in `bucket`."""
    sizes = np.bincount(bucket, minlength=len(buckets)).tolist()
    counts: list[int] = []
    for number, shape in enumerate(buckets):
        left = steps - sum(counts)
        whole, rest = divmod(sizes[number], shape.rows)
        if rest and whole + 1 + _fewest(sizes[number + 1 :], buckets[number + 1 :]) <= left:
            whole += 1
        elif rest and number + 1 < len(buckets):
            bucket[np.flatnonzero(bucket == number)[whole * shape.rows :]] = number + 1
            sizes[number], sizes[number + 1] = whole * shape.rows, sizes[number + 1] + rest
        counts.append(min(whole, left))
    for _ in range(steps - sum(counts)):
        # One more batch for the bucket whose batches are the fullest.
        loads = [
            size / (count * shape.rows) if size > count else 0.0
            for size, count, shape in zip(sizes, counts, buckets, strict=True)
        ]
        counts[int(np.argmax(loads))] += 1
    return counts


def _fewest(sizes: Sequence[int], buckets: Sequence[Shape]) -> int:
    """Returns the fewest batches that hold so many pairs of each bucket.

    Left-over pairs go up where that costs at most one batch.
    """
    count = up = 0
    for number, (size, shape) in enumerate(zip(sizes, buckets, strict=True)):
        whole, up = divmod(size + up, shape.rows)
        count += whole
        if up and (number + 1 == len(buckets) or up > buckets[number + 1].rows):
            count, up = count + 1, 0
    return count

"""Pairs of two languages through a third one: sentences that are translations of one sentence."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.cache.corpus_text import BLOCK, put_numbers, take_numbers, text_file
from m4.data.cleaning.chunk import digests
from m4.data.directions import base_language, languages_of, pair_of, split_direction
from m4.data.sources import SPLITS
from m4.data.splits import normal

Numbers = npt.NDArray[np.uint32]


def write_pivots(
    folder: Path, pairs: Sequence[str], pivoted: Sequence[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Writes which training sentences of two languages have a translation in common.

    The i-th translation of a sentence into one language goes with the i-th into the other one; the
    fewer ones begin again. So each is used, and no pair of languages is larger than those that it
    comes from. A sentence that is in dev or test, but for case, width and spacing, is in no pair.

    Args:
        folder: A corpus's folder, with the text of `pairs`.
        pivoted: Other pairs of languages.

    Returns:
        {pair: {split: {"pairs": number}}} of those that have pairs.
    """
    held_out: dict[str, npt.NDArray[np.bool_]] = {}
    counts = {}
    for pair in pivoted:
        codes = split_direction(pair)
        found = [np.zeros((0, 2), np.uint32)]
        for pivot in languages_of(pairs):
            sides = [pair_of(f"{pivot}-{code}") if code != pivot else "" for code in codes]
            if all(side in pairs for side in sides):
                found.append(_joined(*(_from(folder, side, pivot) for side in sides)))
        numbers = _unique(np.concatenate(found))
        for column, code in enumerate(codes):
            if code not in held_out:
                held_out[code] = _held_out(folder, code, languages_of(pairs))
            numbers = numbers[~held_out[code][numbers[:, column]]]
        if len(numbers):
            put_numbers(folder, "train", pair, numbers)
            counts[pair] = {split: {"pairs": 0} for split in SPLITS}
            counts[pair]["train"]["pairs"] = len(numbers)
            for split in SPLITS[1:]:
                put_numbers(folder, split, pair, numbers[:0])
    return counts


def _from(folder: Path, pair: str, pivot: str) -> Numbers:
    """Returns [n, 2] numbers of a pair's sentences, the pivot's first."""
    numbers = take_numbers(folder, "train", pair)
    return numbers if split_direction(pair)[0] == pivot else numbers[:, ::-1]


def _joined(first: Numbers, second: Numbers) -> Numbers:
    """Returns [k, 2] translations of the same sentence: [n, 2], [m, 2] sentence, translation."""
    first, second = (of[np.argsort(of[:, 0], kind="stable")] for of in (first, second))
    (one, starts, sizes), (other, other_starts, other_sizes) = (
        np.unique(of[:, 0], return_index=True, return_counts=True) for of in (first, second)
    )
    _, i, j = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    most = np.maximum(sizes[i], other_sizes[j])
    number = np.arange(most.sum()) - np.repeat(np.cumsum(most) - most, most)
    columns = [
        of[np.repeat(begin[at], most) + number % np.repeat(size[at], most), 1]
        for of, begin, size, at in (
            (first, starts, sizes, i),
            (second, other_starts, other_sizes, j),
        )
    ]
    return np.stack(columns, axis=1)


def _unique(numbers: Numbers) -> Numbers:
    """Returns the pairs without those that came before."""
    keys = numbers[:, 0].astype(np.uint64) << np.uint64(32) | numbers[:, 1]
    return numbers[np.sort(np.unique(keys, return_index=True)[1])]


def _held_out(folder: Path, code: str, languages: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Returns [n] whether a language's training sentences are in its dev or test text."""
    same = [other for other in languages if base_language(other) == base_language(code)]
    tested = [np.zeros(0, np.uint64)]
    for other in same:
        for split in SPLITS[1:]:
            tested += _digests(text_file(folder, split, other))
    every = np.unique(np.concatenate(tested))
    found = [np.isin(part, every) for part in _digests(text_file(folder, "train", code))]
    return np.concatenate([np.zeros(0, bool), *found])


def _digests(path: Path) -> Iterator[npt.NDArray[np.uint64]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        while block := [*islice(lines, BLOCK)]:
            yield digests([*map(normal, block)])

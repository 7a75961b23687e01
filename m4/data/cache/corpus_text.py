"""The text of a cache: each sentence of a language once, and which sentences are pairs.

text/<split>.<language>.txt has the sentences of a language, one per line, in the order in which the
language pairs, one after another, first have them, so that a pair's sentences are close together.

text/<split>.<pair>.origin has file * 2^32 + line in the source for each pair, in the order of rows,
as compressed differences, which are mostly 1. The files' names are in the manifest ("files").
"""

from __future__ import annotations

import json
import tempfile
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from m4.data.arrays import U32, U64, Array, Integers, Ints, Mask
from m4.data.cleaning.chunk import Chunk, Numbers, check_sentences, chunks, digests
from m4.data.cleaning.clean import Cleaner, Cleaning, sentence_lines
from m4.data.cleaning.english_side import EnglishSides
from m4.data.cleaning.ledger import Count, Ledger
from m4.data.directions import (
    SIDES,
    base_language,
    is_held_out,
    key_of,
    languages_of,
    pair_of,
    split_direction,
)
from m4.data.sources import SPLITS, Pair, Source
from m4.data.splits import normal
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.data.beam import Cleaned, Engine

Pairs = U32  # [n, 2] numbers of sentences
Counts = dict[str, dict[str, dict[str, Any]]]  # by language pair and split, for the manifest
Progress = Callable[[str, int, int], None]  # (stage, done, total)
BLOCK = 1 << 16  # number of pairs to process at once
FILE = 1 << 32  # multiplier of the file in an origin
_BYTES = 1 << 24
_IN_MEMORY = 1 << 25  # bytes above which an array takes a file, and a file descriptor


def text_file(folder: Path, split: str, language: str) -> Path:
    """Returns the file of a language's sentences."""
    return folder / "text" / f"{split}.{language}.txt"


def pair_file(folder: Path, split: str, pair: str, kind: str) -> Path:
    """Returns a file about the pairs of two languages, such as 'origin' or 'subsets.json'."""
    return folder / "text" / f"{split}.{key_of(pair)}.{kind}"


def on_disk(folder: Path | None, size: int, kind: npt.DTypeLike) -> Array:
    """Returns [size] zeros in a file without a name, so that memory need not hold them.

    Args:
        folder: Folder of the file. Defaults to the system's temporary folder (TMPDIR).
    """
    if size * np.dtype(kind).itemsize < _IN_MEMORY:
        return np.zeros(size, kind)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size * np.dtype(kind).itemsize)
        return np.memmap(file, kind, "r+", shape=size)


class Lines:
    """Lines of a text file by number, at the cost of 8 bytes of disk each."""

    def __init__(self, path: Path) -> None:
        self._text: Any = b""
        with path.open("rb") as file:
            counts = [block.count(b"\n") for block in iter(lambda: file.read(_BYTES), b"")]
            self._ends = on_disk(None, 1 + sum(counts), np.int64)
            self._ends[0], done = -1, 1
            file.seek(0)
            for number, count in enumerate(counts):
                block = np.frombuffer(file.read(_BYTES), np.uint8)
                ends = np.flatnonzero(block == ord("\n")) + number * _BYTES
                self._ends[done : done + count] = ends
                done += count
            if counts:
                self._text = mmap(file.fileno(), 0, access=ACCESS_READ)

    def take(self, numbers: Integers) -> list[str]:
        """Returns the lines of these numbers, without the line ends."""
        starts, stops = self._ends[numbers] + 1, self._ends[numbers + 1]
        text = self._text
        ends = zip(starts.tolist(), stops.tolist(), strict=True)
        lines = [text[start:stop].decode() for start, stop in ends]
        if len(text) > _IN_MEMORY:  # otherwise memory would grow to the file's size
            text.madvise(MADV_DONTNEED)
        return lines


class TextWriter:
    """Writer of a split's text, with its pairs as [n, 2] numbers of sentences."""

    def __init__(
        self, folder: Path, split: str, pairs: Sequence[str], *, once: bool = True
    ) -> None:
        """Prepares to write `pairs`. Equal sentences are stored `once`, or each time they occur."""
        self._folder, self._split, self._once = folder, split, once
        self._numbers: dict[str, Numbers] = defaultdict(Numbers)
        self._left = Counter(code for pair in pairs for code in split_direction(pair))

    def add(self, pair: str, chunk: Chunk) -> None:
        """Adds pairs of two languages. Raises InputError for a tab or line break in a sentence."""
        columns = []
        for side, code in zip(SIDES, split_direction(pair), strict=True):
            texts, numbers = chunk.side(side), self._numbers[code]
            if self._once:
                found, new = numbers(chunk.digests(side))
                texts = [texts[place] for place in new.tolist()]
            else:
                found = np.arange(numbers.count, numbers.count + len(chunk))
                numbers.count += len(chunk)
            check_sentences(code, numbers.count)
            with text_file(self._folder, self._split, code).open("ab") as file:
                file.write(sentence_lines(texts, chunk, pair, self._split))
            columns.append(found)
        with numbers_file(self._folder, self._split, pair).open("ab") as file:
            np.stack(columns, axis=1).astype(np.uint32).tofile(file)

    def end(self, pair: str) -> None:
        """Closes the files, which also exist for languages without text."""
        numbers_file(self._folder, self._split, pair).touch()
        for code in split_direction(pair):
            text_file(self._folder, self._split, code).touch()
            self._left[code] -= 1
            if not self._left[code]:
                self._numbers.pop(code, None)


def numbers_file(folder: Path, split: str, pair: str) -> Path:
    """Returns the temporary file of [n, 2] numbers of sentences."""
    return pair_file(folder, split, pair, "numbers")


def take_numbers(folder: Path, split: str, pair: str) -> Pairs:
    """Returns the [n, 2] numbers that `TextWriter` wrote for a pair, mapped from the file."""
    path = numbers_file(folder, split, pair)
    there = np.memmap(path, np.uint32, "r") if path.stat().st_size else np.zeros(0, np.uint32)
    return there.reshape(-1, 2)


def write_text(
    folder: Path, source: Source, pairs: Sequence[str], cleaning: Cleaning, progress: Progress,
    untrained: Collection[str] = (), engine: Engine | None = None,
) -> tuple[Counts, Ledger]:  # fmt: skip
    """Writes the cleaned text of a source.

    Args:
        untrained: Language pairs that may lack training pairs.
        engine: Engine that cleans training text. Defaults to this process.

    Returns:
        {pair: {split: {"pairs": number}}}, and the ledger.

    Raises:
        InputError: A pair has no training text, or text in another language than it claims.
    """
    counts: Counts = {pair: {} for pair in pairs}
    done, subsets = 0, getattr(source, "subsets", None)
    recorded, sides = Recorded(source), EnglishSides()
    cleaner = Cleaner(cleaning, cast(Source, recorded), pairs, folder / "text", on_read=sides.add)
    cleaned: Cleaned | None = None
    for split in reversed(SPLITS):  # test and dev come first, as cleaning of train needs them
        if split == "train" and engine is not None:
            for pair in pairs:
                sides.read(pair, split, chunks(source.pairs(pair, split)))
                sides.check(pair, split)
            cleaned = engine.clean(cleaner, source, pairs)
        writer = TextWriter(folder, split, pairs)
        for pair in pairs:
            progress("text", done, len(SPLITS) * len(pairs))
            origins = pair_file(folder, split, pair, "origin")
            if cleaned is not None:
                texts = [text_file(folder, split, code) for code in split_direction(pair)]
                numbers = numbers_file(folder, split, pair)
                kept, files = cleaned.write(pair, texts, numbers, origins)
            else:
                kept = 0
                # Additional text of a language is only for training, even if a hash decides splits.
                used = split == "train" or is_held_out(pair)
                for chunk in cleaner.pairs(pair, split) if used else ():
                    if split != "train":
                        chunk = cleaning.normalise_all(chunk)
                    writer.add(pair, chunk)
                    recorded.keep(chunk.numbers, origins)
                    kept += len(chunk)
                files = recorded.end(origins)
            writer.end(pair)
            sides.check(pair, split)
            counts[pair][split] = {"pairs": kept, **files}
            if split == "train" and not kept and pair not in untrained:
                why = why_none(cleaner.ledger.count(pair, split))
                raise InputError(f"{pair} has no training pairs: {why}")
            if subsets is not None and split != "train":
                parts = {name: list(map(bool, part)) for name, part in subsets(pair, split).items()}
                assert all(len(part) == kept for part in parts.values()), (pair, split)
                pair_file(folder, split, pair, "subsets.json").write_text(json.dumps(parts))
            done += 1
    progress("text", done, done)
    return counts, cleaner.finish()


def why_none(count: Count) -> str:
    """Returns the reason why no pair is left after cleaning."""
    if not count.read:
        return "the source has none"
    reasons = ", ".join(f"{reason} {pairs:,}" for reason, pairs in count.dropped.most_common())
    return f"all {count.read:,} are dropped: {reasons} (Cleaning.stages)"


def texts_of_pairs(
    folder: Path, split: str, pair: str, numbers: Integers, lines: dict[str, Lines]
) -> tuple[list[str], list[str]]:
    """Returns the texts of [n, 2] sentences; `lines` caches the lines of languages."""
    codes = split_direction(pair)
    for code in codes:
        if code not in lines:
            lines[code] = Lines(text_file(folder, split, code))
    first, second = (lines[code].take(numbers[:, side]) for side, code in enumerate(codes))
    return first, second


# The file and line of each pair.


class Origin(NamedTuple):
    """The place of a pair: a file of the source, by name in its folder, and a line."""

    file: str
    line: int


class Recorded:
    """A source that records the origins of the pairs read from it.

    It holds the origins for two languages and a split, with 8 bytes per pair. It records nothing
    for a source without `reading`, which knows no origins.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.knows = hasattr(source, "reading")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        return self.noted(self._source.pairs(pair, split))

    def noted(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Yields pairs read from the source, and forgets earlier origins."""
        source: Any = self._source
        self._files: dict[str, int] = {}
        self._places = array("q")
        for texts in pairs:
            if self.knows:
                name, line = source.reading.origin
                self._places.append(self._files.setdefault(name, len(self._files)) * FILE + line)
            yield texts

    def keep(self, numbers: Ints, path: Path) -> None:
        """Writes the origins of the kept pairs, given by number in the source, from 1."""
        if self.knows:
            with path.open("ab") as file:
                np.frombuffer(self._places, np.int64)[numbers - 1].tofile(file)

    def found(self) -> tuple[list[str] | None, Ints]:
        """Returns the files' names, and for each pair its file number * FILE + its line."""
        return [*self._files] if self.knows else None, np.array(self._places)

    def where(self, number: int) -> str:
        """Returns where the source has the pair of a number, from 1, for messages."""
        return place_of(*self.found(), number)

    def end(self, path: Path) -> dict[str, list[str]]:
        """Returns the manifest's entry on the files that were read."""
        if not self.knows:
            return {}
        path.touch()  # the file also exists if no pair is left
        return {"files": [*self._files]}


def place_of(files: Sequence[str] | None, places: Ints, number: int) -> str:
    """Returns the file and line of a pair in words, from what `Recorded.found` returns."""
    file, line = divmod(int(places[number - 1]), FILE) if files else (0, 0)
    return f"{files[file]} line {line}" if files else f"pair {number}"


def compress_origins(path: Path, kept: Mask) -> None:
    """Compresses the origins that `Recorded` wrote, if any, for the kept pairs."""
    if path.is_file():
        packer, packed, last = zlib.compressobj(1), [], np.zeros(1, np.int64)
        for start in range(0, len(kept), BLOCK):
            some = kept[start : start + BLOCK]
            places = np.fromfile(path, np.int64, len(some), offset=8 * start)[some]
            places = np.concatenate([last, places])
            packed.append(packer.compress(np.diff(places).tobytes()))
            last = places[-1:]
        path.write_bytes(b"".join(packed) + packer.flush())


def read_origins(path: Path, files: Sequence[str]) -> list[Origin] | None:
    """Returns the origin of each row of a split, or None if its source had none."""
    if not path.is_file():
        return None
    places = np.cumsum(np.frombuffer(zlib.decompress(path.read_bytes()), np.int64))
    return [Origin(files[int(place) // FILE], int(place) % FILE) for place in places]


# Pairs of two languages that are translations of the same sentence in a third one.


def write_pivots(folder: Path, pairs: Sequence[str], pivoted: Sequence[str]) -> Counts:
    """Writes the pairs of training sentences that share a translation in a third language.

    The i-th translation of a sentence into one language is paired with the i-th into the other; if
    a language has fewer, they repeat. Thus each is used, and no language pair is larger than those
    that it comes from. No pair has a sentence of dev or test, up to case, width and spacing.

    The folder has the text of `pairs`. Returns {pair: {split: {"pairs": number}}} for `pivoted`.
    """
    held_out: dict[str, Mask] = {}
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
            numbers.tofile(numbers_file(folder, "train", pair))
            counts[pair] = {split: {"pairs": 0} for split in SPLITS}
            counts[pair]["train"]["pairs"] = len(numbers)
            for split in SPLITS[1:]:
                numbers_file(folder, split, pair).touch()
    return counts


def _from(folder: Path, pair: str, pivot: str) -> Pairs:
    """Returns [n, 2] numbers of a pair's sentences, the pivot's first."""
    numbers = take_numbers(folder, "train", pair)
    return numbers if split_direction(pair)[0] == pivot else numbers[:, ::-1]


def _joined(first: Pairs, second: Pairs) -> Pairs:
    """Returns [k, 2] translations of equal sentences, from [n, 2] (sentence, translation)."""
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


def _unique(numbers: Pairs) -> Pairs:
    """Returns the pairs without repetitions."""
    keys = numbers[:, 0].astype(np.uint64) << np.uint64(32) | numbers[:, 1]
    return numbers[np.sort(np.unique(keys, return_index=True)[1])]


def _held_out(folder: Path, code: str, languages: Sequence[str]) -> Mask:
    """Returns [n]: whether each training sentence of a language is in its dev or test text."""
    same = [other for other in languages if base_language(other) == base_language(code)]
    tested = [np.zeros(0, np.uint64)]
    for other in same:
        for split in SPLITS[1:]:
            tested += _digests(text_file(folder, split, other))
    every = np.unique(np.concatenate(tested))
    found = [np.isin(part, every) for part in _digests(text_file(folder, "train", code))]
    return np.concatenate([np.zeros(0, bool), *found])


def _digests(path: Path) -> Iterator[U64]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        while block := [*islice(lines, BLOCK)]:
            yield digests([*map(normal, block)])

"""The text of a cache: each sentence of a language once, and which sentences are pairs.

text/<split>.<language>.txt has the sentences of a language, a line each. Their order is that in
which the pairs of languages, one after another, first have them; so a pair's sentences are close to
each other.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from m4.data.beam import Engine
from m4.data.cache.origins import Recorded
from m4.data.cleaning.chunk import Chunk, Numbers, chunks
from m4.data.cleaning.clean import Cleaner, Cleaning, lines_of
from m4.data.cleaning.english_side import EnglishSides
from m4.data.cleaning.ledger import Count, Ledger
from m4.data.directions import SIDES, is_held_out, key_of, split_direction
from m4.data.sources import SPLITS, Source
from m4.settings import InputError

Progress = Callable[[str, int, int], None]  # (stage, done, total)
BLOCK = 1 << 16  # pairs
_BYTES = 1 << 24


def text_file(folder: Path, split: str, language: str) -> Path:
    """Returns the file of a language's sentences."""
    return folder / "text" / f"{split}.{language}.txt"


def pair_file(folder: Path, split: str, pair: str, kind: str) -> Path:
    """Returns a file about the pairs of two languages: 'origin', 'subsets.json'."""
    return folder / "text" / f"{split}.{key_of(pair)}.{kind}"


class Lines:
    """The lines of a text file, by their numbers, with 8 bytes of memory each."""

    def __init__(self, path: Path) -> None:
        self._ends = np.full(1, -1)
        self._text: Any = b""
        if path.stat().st_size:
            with path.open("rb") as file:
                self._text = mmap(file.fileno(), 0, access=ACCESS_READ)
            of_bytes = np.frombuffer(self._text, np.uint8)
            ends = [
                np.flatnonzero(of_bytes[start : start + _BYTES] == ord("\n")) + start
                for start in range(0, len(of_bytes), _BYTES)
            ]
            self._ends = np.concatenate([self._ends, *ends])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def take(self, numbers: npt.NDArray[np.integer]) -> list[str]:
        """Returns the lines of these numbers, without the line ends."""
        starts, stops = self._ends[numbers] + 1, self._ends[numbers + 1]
        text = self._text
        return [text[a:b].decode() for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


class TextWriter:
    """The text of a split as it is written, and its pairs as [n, 2] numbers of sentences."""

    def __init__(
        self, folder: Path, split: str, pairs: Sequence[str], *, once: bool = True
    ) -> None:
        """Writes nothing yet. Equal sentences are stored once, or each time; `pairs` are added."""
        self._folder, self._split, self._once = folder, split, once
        self._numbers: dict[str, Numbers] = defaultdict(Numbers)
        self._left = Counter(code for pair in pairs for code in split_direction(pair))

    def add(self, pair: str, chunk: Chunk) -> None:
        """Adds pairs of two languages; InputError for a tab or line end inside a sentence."""
        columns = []
        for side, code in zip(SIDES, split_direction(pair), strict=True):
            texts, numbers = chunk.side(side), self._numbers[code]
            if self._once:
                found, new = numbers(chunk.digests(side))
                texts = [texts[place] for place in new.tolist()]
            else:
                found = np.arange(numbers.count, numbers.count + len(chunk))
                numbers.count += len(chunk)
            lines = "".join([f"{text}\n" for text in texts])
            if lines.count("\n") != len(texts) or "\t" in lines or "\r" in lines:
                lines_of(chunk, pair, self._split)  # raises
            with text_file(self._folder, self._split, code).open("ab") as file:
                file.write(lines.encode())
            columns.append(found)
        with _numbers_file(self._folder, self._split, pair).open("ab") as file:
            np.stack(columns, axis=1).astype(np.uint32).tofile(file)

    def end(self, pair: str) -> None:
        """Makes files also of languages without text, and of no pairs."""
        _numbers_file(self._folder, self._split, pair).touch()
        for code in split_direction(pair):
            text_file(self._folder, self._split, code).touch()
            self._left[code] -= 1
            if not self._left[code]:
                self._numbers.pop(code, None)


def _numbers_file(folder: Path, split: str, pair: str) -> Path:
    return pair_file(folder, split, pair, "numbers")


def take_numbers(folder: Path, split: str, pair: str) -> npt.NDArray[np.uint32]:
    """Returns [n, 2] what `TextWriter` wrote of a pair of languages, as a map of the file."""
    path = _numbers_file(folder, split, pair)
    there = np.memmap(path, np.uint32, "r") if path.stat().st_size else np.zeros(0, np.uint32)
    return there.reshape(-1, 2)


def put_numbers(folder: Path, split: str, pair: str, numbers: npt.NDArray[np.uint32]) -> None:
    """Writes [n, 2] numbers of sentences that are in the text."""
    numbers.tofile(_numbers_file(folder, split, pair))


def remove_numbers(folder: Path, split: str, pair: str) -> None:
    _numbers_file(folder, split, pair).unlink()


def write_text(
    folder: Path,
    source: Source,
    pairs: Sequence[str],
    cleaning: Cleaning,
    progress: Progress,
    untrained: Collection[str] = (),
    engine: Engine | None = None,
) -> tuple[dict[str, dict[str, dict[str, Any]]], Ledger]:
    """Writes the cleaned text of a source.

    Args:
        untrained: Pairs of languages that may lack training pairs.
        engine: Cleans training text. Defaults to this process.

    Returns:
        {pair: {split: {"pairs": number}}}, and the ledger.

    Raises:
        InputError: A pair has no training text, or text in another language than it says.
    """
    counts: dict[str, dict[str, dict[str, Any]]] = {pair: {} for pair in pairs}
    done, subsets = 0, getattr(source, "subsets", None)
    recorded, sides = Recorded(source), EnglishSides()
    cleaner = Cleaner(cleaning, cast(Source, recorded), pairs, folder / "text", on_read=sides.add)
    text_of, origins_of = cleaner, recorded
    for split in reversed(SPLITS):  # test and dev first: train must know them
        if split == "train" and engine is not None:
            for pair in pairs:
                sides.read(pair, split, chunks(source.pairs(pair, split)))
                sides.check(pair, split)
            text_of = origins_of = engine.clean(cleaner, cleaning, source, pairs)
        writer = TextWriter(folder, split, pairs)
        for pair in pairs:
            progress("text", done, len(SPLITS) * len(pairs))
            kept, origins = 0, pair_file(folder, split, pair, "origin")
            # Other text of a language is trained on alone, also where a hash decides splits.
            used = split == "train" or is_held_out(pair)
            for chunk in text_of.pairs(pair, split) if used else ():
                if split != "train":
                    chunk = cleaning.normalise_all(chunk)
                writer.add(pair, chunk)
                origins_of.keep(chunk.numbers, origins)
                kept += len(chunk)
            writer.end(pair)
            sides.check(pair, split)
            counts[pair][split] = {"pairs": kept, **origins_of.end(origins)}
            if split == "train" and not kept and pair not in untrained:
                raise InputError(
                    f"{pair} has no training pairs: {why_none(cleaner.ledger.count(pair, split))}"
                )
            if subsets is not None and split != "train":
                parts = {name: list(map(bool, part)) for name, part in subsets(pair, split).items()}
                assert all(len(part) == kept for part in parts.values()), (pair, split)
                pair_file(folder, split, pair, "subsets.json").write_text(json.dumps(parts))
            done += 1
    progress("text", done, done)
    return counts, cleaner.finish()


def why_none(count: Count) -> str:
    """Why nothing is left of what was read."""
    if not count.read:
        return "the source has none"
    reasons = ", ".join(f"{reason} {pairs:,}" for reason, pairs in count.dropped.most_common())
    return f"all {count.read:,} are dropped: {reasons} (Cleaning.stages)"


def texts_of_pairs(
    folder: Path, split: str, pair: str, numbers: npt.NDArray[np.integer], lines: dict[str, Lines]
) -> tuple[list[str], list[str]]:
    """Returns the texts of [n, 2] sentences; `lines` keeps languages' lines for others."""
    codes = split_direction(pair)
    for code in codes:
        if code not in lines:
            lines[code] = Lines(text_file(folder, split, code))
    first, second = (lines[code].take(numbers[:, side]) for side, code in enumerate(codes))
    return first, second


def lines_of_pairs(
    folder: Path, split: str, pair: str, numbers: npt.NDArray[np.integer], lines: dict[str, Lines]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the texts of pairs in blocks."""
    for start in range(0, len(numbers), BLOCK):
        yield texts_of_pairs(folder, split, pair, numbers[start : start + BLOCK], lines)

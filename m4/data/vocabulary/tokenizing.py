"""Tokenizes stretches of a corpus's text on all cores.

A worker has its own vocabularies: its result depends on the stretch alone, so that the number of
workers changes nothing.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m4.data.directions import SIDES
from m4.data.splits import text_hash
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.parallel.platform.signals import end_with

_RANGE_BYTES = 1 << 20
# Names of the sides in the seeds of sampled segmentations. Others would give other ids.
_SEEDED = {"first": "english", "second": "foreign"}


class TokenArray(NamedTuple):
    """One token array of a split: its side, its vocabulary, and its largest number of ids."""

    name: str
    side: str
    vocabulary: Path
    longest: int
    role: str | None = None  # "source" or "target"; None for both, whose ids are the same.


class TextRange(NamedTuple):
    """Whole lines of a text file, from byte `start` up to `stop`.

    In `train` pairs that are too long are left out, and there are several segmentations. The
    sources of `synthetic` sides get a mark in front.
    """

    path: Path
    start: int
    stop: int
    train: bool
    synthetic: tuple[str, ...] = ()


class Tokenized(NamedTuple):
    """A tokenized range."""

    text: bytes
    pairs: int
    too_long: int  # pairs with a side that is too long
    arrays: dict[str, list[Ragged]]  # name -> one Ragged for each segmentation, the best one first
    # Numbers of the pairs that are left. Defaults to all.
    kept: npt.NDArray[np.int64] | None = None


class RangeTokenizer:
    """Tokenizes ranges of text.

    Training sentences are tokenized `segmentations` times: once in the best way, then with
    BPE-dropout `alpha`, from the range's own seed. A sampled segmentation that is longer than
    allowed is replaced by the best one.
    """

    def __init__(
        self, arrays: Sequence[TokenArray], segmentations: int, alpha: float | None
    ) -> None:
        self.arrays, self.segmentations, self.alpha = arrays, segmentations, alpha
        self._vocabularies = {a.vocabulary: Vocabulary(a.vocabulary) for a in arrays}
        self._types = {path: id_type(path) for path in self._vocabularies}
        if segmentations > 1:
            # Here, because it brings a compiler, which nothing else needs to tokenize.
            from m4.data.vocabulary.bpe_dropout import Dropout

            self._dropouts = {path: Dropout(v) for path, v in self._vocabularies.items()}

    def __call__(self, span: TextRange) -> Tokenized:
        with span.path.open("rb") as file:
            file.seek(span.start)
            return self.of(span, file.read(span.stop - span.start))

    def of(self, span: TextRange, text: bytes) -> Tokenized:
        """Tokenizes a range, whose text is given."""
        letters = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero((letters == ord("\t")) | (letters == ord("\n")))
        starts = np.concatenate([[0], ends + 1])[:-1]
        lines = ends[1::2] + 1
        assert letters[ends].tobytes() == b"\t\n" * len(lines), span
        sides = {
            side: [
                text[start:end].decode()
                for start, end in zip(starts[i::2].tolist(), ends[i::2].tolist(), strict=True)
            ]
            for i, side in enumerate(SIDES)
        }
        best = {
            a.name: Ragged.of(self._encode(a, sides[a.side], a.side in span.synthetic))
            for a in self.arrays
        }
        long = np.any([best[a.name].lengths > a.longest for a in self.arrays], axis=0)
        pairs, kept = len(lines), None
        if span.train and long.any():
            text = letters[np.repeat(~long, np.diff(lines, prepend=0))].tobytes()
            kept = np.flatnonzero(~long)
            best = {name: ragged.take(kept) for name, ragged in best.items()}
            pairs = len(kept)
        ways = self.segmentations if span.train else 1
        return Tokenized(
            text,
            pairs,
            int(long.sum()),
            {
                a.name: [self._way(a, best[a.name], span, way) for way in range(ways)]
                for a in self.arrays
            },
            kept,
        )

    def _encode(self, array: TokenArray, texts: Sequence[str], synthetic: bool) -> list[list[int]]:
        vocabulary = self._vocabularies[array.vocabulary]
        if array.role == "target":
            return vocabulary.encode_targets(texts)
        mark = [vocabulary.synthetic_id] if synthetic else []
        return [mark + ids for ids in vocabulary.encode(texts)]

    def _way(self, array: TokenArray, best: Ragged, span: TextRange, way: int) -> Ragged:
        """Returns one segmentation of each sentence, with ids of the array's type."""
        found = best
        if way > 0:
            assert self.alpha is not None
            # The name, not the path: a cache is the same in every folder.
            name = array.name.replace(array.side, _SEEDED[array.side])
            seed = text_hash(f"{span.path.name} {span.start} {name} {way}")
            sampled = self._dropouts[array.vocabulary].sample(best, self.alpha, seed)
            if (too_long := sampled.lengths > array.longest).any():
                number = np.arange(len(too_long))
                rows = np.where(too_long, number + len(number), number)
                sampled = Ragged.joined([sampled, best]).take(rows)
            found = sampled
        return found._replace(ids=found.ids.astype(self._types[array.vocabulary]))


def id_type(vocabulary: Path) -> type[np.uint16] | type[np.int32]:
    """Returns the type in which the ids of a vocabulary are stored."""
    return np.uint16 if Vocabulary(vocabulary).size <= 1 << 16 else np.int32


def ranges_of(path: Path, train: bool, synthetic: tuple[str, ...] = ()) -> Iterator[TextRange]:
    """Yields a text file in stretches of about a megabyte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            file.seek(min(start + _RANGE_BYTES, size))
            file.readline()
            yield TextRange(path, start, stop := file.tell(), train, synthetic)
            start = stop


def tokenized(
    spans: Iterable[TextRange],
    arrays: Sequence[TokenArray],
    segmentations: int,
    alpha: float | None,
    workers: int,
) -> Iterator[Tokenized]:
    """Yields the ranges' results in their order; a few of them are in memory at a time."""
    if workers < 2:
        yield from map(RangeTokenizer(arrays, segmentations, alpha), spans)
        return
    # Spawned, not forked: the program around may have threads and an accelerator.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(), arrays, segmentations, alpha),
    )
    waiting: deque[Future[Tokenized]] = deque()
    try:
        for span in spans:
            waiting.append(pool.submit(_tokenize, span))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer: RangeTokenizer | None = None


def _start(
    parent: int, arrays: Sequence[TokenArray], segmentations: int, alpha: float | None
) -> None:
    global _tokenizer
    # A parent that was killed closes no pool. Ctrl-C is for the parent, which ends the workers.
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tokenizer = RangeTokenizer(arrays, segmentations, alpha)


def _tokenize(span: TextRange) -> Tokenized:
    assert _tokenizer is not None
    return _tokenizer(span)

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

from m4.data.cleaning.chunk import digests
from m4.data.splits import text_hash
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.vocabulary import Vocabulary
from m4.parallel.platform.signals import end_with

_RANGE_BYTES = 1 << 20


class TokenArray(NamedTuple):
    """The ids of one side of all pairs: its vocabulary, and its largest number of ids.

    Attributes:
        role: 'source' or 'target'. Defaults to both, whose ids are the same.
        store: The role where roles have their own ids, else ''.
    """

    side: str
    vocabulary: Path
    longest: int
    role: str | None = None
    store: str = ""

    @property
    def name(self) -> str:
        """Name in the manifest."""
        return array_name(self.side, self.store)


def array_name(first: str, store: str) -> str:
    """Returns the name of a side or a split in a store: 'first', or 'first.source'."""
    return f"{first}.{store}" if store else first


class TextRange(NamedTuple):
    """Whole lines of a language's text, from byte `start` up to `stop`.

    In `train` there are several segmentations. The sources of a `synthetic` language get a mark in
    front.
    """

    path: Path
    start: int
    stop: int
    train: bool
    stores: tuple[str, ...] = ("",)
    synthetic: bool = False


# Store -> a Ragged for each segmentation of the sentences of a range, the best one first.
Tokenized = dict[str, list[Ragged]]


class RangeTokenizer:
    """Tokenizes ranges of text.

    Training sentences are tokenized `segmentations` times: once in the best way, then with
    BPE-dropout `alpha`, from the sentence's own seed. A sampled segmentation that is longer than
    allowed is replaced by the best one.
    """

    def __init__(
        self, arrays: Sequence[TokenArray], segmentations: int, alpha: float | None
    ) -> None:
        self._arrays = {a.store: a for a in arrays}
        self.segmentations, self.alpha = segmentations, alpha
        self._vocabularies = {a.vocabulary: Vocabulary(a.vocabulary) for a in arrays}
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
        texts = text.decode().split("\n")[:-1]
        ways = self.segmentations if span.train else 1
        found = {}
        for store in span.stores:
            array = self._arrays[store]
            best = Ragged.of(self._encode(array, texts, span.synthetic))
            others = [self._sampled(array, best, texts, way) for way in range(1, ways)]
            found[store] = [best, *others]
        return found

    def _encode(self, array: TokenArray, texts: Sequence[str], synthetic: bool) -> list[list[int]]:
        vocabulary = self._vocabularies[array.vocabulary]
        if array.role == "target":
            return vocabulary.encode_targets(texts)
        mark = [vocabulary.synthetic_id] if synthetic else []
        return [mark + ids for ids in vocabulary.encode(texts)]

    def _sampled(self, array: TokenArray, best: Ragged, texts: Sequence[str], way: int) -> Ragged:
        """Returns another segmentation of each sentence."""
        assert self.alpha is not None
        seeds = digests(texts) + np.uint64(text_hash(f"{array.store} {way}"))
        sampled = self._dropouts[array.vocabulary].sample(best, self.alpha, seeds)
        if (too_long := sampled.lengths > array.longest).any():
            number = np.arange(len(too_long))
            rows = np.where(too_long, number + len(number), number)
            sampled = Ragged.joined([sampled, best]).take(rows)
        return sampled


def id_type(vocabulary: Path) -> type[np.uint16] | type[np.int32]:
    """Returns the type in which the ids of a vocabulary are stored."""
    return np.uint16 if Vocabulary(vocabulary).size <= 1 << 16 else np.int32


def ranges_of(
    path: Path, train: bool, stores: tuple[str, ...] = ("",), synthetic: bool = False
) -> Iterator[TextRange]:
    """Yields a text file in stretches of about a megabyte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            file.seek(min(start + _RANGE_BYTES, size))
            file.readline()
            yield TextRange(path, start, stop := file.tell(), train, stores, synthetic)
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

"""Tokenization of ranges of a corpus's text on all cores.

A worker has its own vocabularies, and its result depends only on the range, so the number of
workers changes nothing.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from m4.data.arrays import U64, Int32, Ints
from m4.data.cleaning.chunk import digests
from m4.data.compiled import compiled
from m4.data.permutation import GOLDEN, mix
from m4.data.splits import text_hash
from m4.data.vocabulary import Ragged
from m4.data.vocabulary.vocabulary import SPACE, Vocabulary
from m4.parallel.platform.signals import end_with

_RANGE_BYTES = 1 << 20
_mix = compiled(mix)


class TokenArray(NamedTuple):
    """Ids of one side of all pairs: the vocabulary, and the maximum length.

    Attributes:
        role: 'source' or 'target'. Defaults to both, with the same ids.
        store: The role if roles have separate ids, otherwise ''.
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
    """Returns the name of a side or split in a store: 'first' or 'first.source'."""
    return f"{first}.{store}" if store else first


class TextRange(NamedTuple):
    """Whole lines of a language's text, from byte `start` to `stop`.

    In `train`, it has several segmentations. Sources of a `synthetic` language get a mark.
    """

    path: Path
    start: int
    stop: int
    train: bool
    stores: tuple[str, ...] = ("",)
    synthetic: bool = False


# Store -> a Ragged for each segmentation of a range's sentences, the best one first.
Tokenized = dict[str, list[Ragged]]


class RangeTokenizer:
    """Tokenizes ranges of text.

    Training sentences are tokenized `segmentations` times: first in the best way, then with
    BPE-dropout `alpha` by the sentence's own seed, with the best one instead of one too long.
    """

    def __init__(
        self, arrays: Sequence[TokenArray], segmentations: int, alpha: float | None
    ) -> None:
        self._arrays = {a.store: a for a in arrays}
        self.segmentations, self.alpha = segmentations, alpha
        self._vocabularies = {a.vocabulary: Vocabulary(a.vocabulary) for a in arrays}
        if segmentations > 1:
            self._dropouts = {path: Dropout(v) for path, v in self._vocabularies.items()}

    def __call__(self, span: TextRange) -> Tokenized:
        with span.path.open("rb") as file:
            file.seek(span.start)
            return self.of(span, file.read(span.stop - span.start))

    def of(self, span: TextRange, text: bytes) -> Tokenized:
        """Tokenizes a range, given its text."""
        texts = text.decode().split("\n")[:-1]
        ways = self.segmentations if span.train else 1
        found = {}
        for store in span.stores:
            array = self._arrays[store]
            vocabulary = self._vocabularies[array.vocabulary]
            marked = span.synthetic and array.role != "target"
            mark = [vocabulary.synthetic_id] if marked else []
            best = Ragged.of([mark + ids for ids in vocabulary.encode(texts)])
            others = [self._sampled(array, best, texts, way) for way in range(1, ways)]
            found[store] = [best, *others]
        return found

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


def in_parts(text: TextRange) -> Iterator[TextRange]:
    """Yields a range in parts of about a megabyte."""
    start = text.start
    with text.path.open("rb") as file:
        while start < text.stop:
            file.seek(min(start + _RANGE_BYTES, text.stop))
            file.readline()
            yield text._replace(start=start, stop=file.tell())
            start = file.tell()


def tokenized(
    spans: Iterable[TextRange], arrays: Sequence[TokenArray], segmentations: int,
    alpha: float | None, workers: int,
) -> Iterator[Tokenized]:  # fmt: skip
    """Yields the results of ranges in order, with a few in memory at a time."""
    if workers < 2:
        yield from map(RangeTokenizer(arrays, segmentations, alpha), spans)
        return
    # Spawned, not forked, as the program may have threads and an accelerator.
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


def _start(parent: int, *given: Any) -> None:
    global _tokenizer
    # A killed parent cannot close its pool. On Ctrl-C, the parent ends the workers.
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tokenizer = RangeTokenizer(*given)


def _tokenize(span: TextRange) -> Tokenized:
    assert _tokenizer is not None
    return _tokenizer(span)


class Dropout:
    """BPE-dropout, which randomly leaves out merges, starting from the best segmentation.

    Source: Provilkov et al. 2020, arXiv 1910.13267, algorithm 1. SentencePiece can also do this,
    but its random numbers differ between processes with any seed (measured with 0.2.3), so a corpus
    that is built twice would differ.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = vocabulary.pieces
        # Special pieces, tags and bytes are not split.
        whole = {*range(vocabulary.byte_ids.stop), *vocabulary.tag_ids}
        number = {piece: i for i, piece in enumerate(pieces) if i not in whole}
        self._characters = Ragged.of(
            [[i] if i in whole else [number[c] for c in p] for i, p in enumerate(pieces)]
        )
        # If no piece has a space inside, the ids of a text are those of its words.
        by_words = not any(SPACE in piece[1:] for piece in vocabulary.pieces)
        self._space = number.get(SPACE, -1) if by_words else -1
        # A merged piece's id is its priority, as merges are in the order of learning.
        pairs = [
            (number[p[:cut]] * len(pieces) + number[p[cut:]], merged)
            for p, merged in number.items()
            for cut in range(1, len(p))
            if p[:cut] in number and p[cut:] in number
        ]
        keys, merged = np.array(pairs or np.zeros((0, 2)), np.int64).T
        self._size = len(pieces)
        self._keys, self._merged = _table(keys.copy(), merged.astype(np.int32))

    def sample(self, best: Ragged, alpha: float, seeds: U64) -> Ragged:
        """Returns other segmentations of texts, from the best ones.

        Each merge is left out with probability `alpha`, drawn anew at every step. A text's ids
        depend only on its own seed.
        """
        characters = self._characters.take(best.ids)
        # Ends of each text's characters. (np.add.reduceat does not support empty rows.)
        ends = np.concatenate([[0], np.cumsum(characters.lengths)])[np.cumsum(best.lengths)]
        table = (self._keys, self._merged, self._size)
        ends = ends.astype(np.int64)
        return Ragged(*_sample(characters.ids, ends, table, self._space, alpha, seeds))


@compiled
def _place(keys: Ints, key: int | np.int64) -> int:
    """Returns the position of a key in the table, or the next free one."""
    mask = len(keys) - 1
    place = (np.uint64(key) * GOLDEN) >> np.uint64(20)
    index = np.int64(place & np.uint64(mask))
    while keys[index] != -1 and keys[index] != key:
        index = (index + 1) & mask
    return int(index)


@compiled
def _table(keys: Ints, values: Int32) -> tuple[Ints, Int32]:
    """Makes a hash table with open addressing, at most half full, with key -1 for free places."""
    size = 2
    while size < 2 * len(keys) + 2:
        size *= 2
    places, found = np.full(size, -1, np.int64), np.full(size, -1, np.int32)
    for i in range(len(keys)):
        index = _place(places, keys[i])
        places[index], found[index] = keys[i], values[i]
    return places, found


@compiled
def _merged(table: tuple[Ints, Int32, int], left: int, right: int) -> int:
    """Returns the piece into which two pieces merge, or -1."""
    keys, values, size = table
    return int(values[_place(keys, np.int64(left) * size + right)])


@compiled
def _sample(
    characters: Int32, ends: Ints, table: tuple[Ints, Int32, int], space: int, alpha: float,
    seeds: U64,
) -> tuple[Int32, Ints]:  # fmt: skip
    """Returns ids, and their number by text; `ends` has the ends of each text's characters."""
    ids, lengths = np.empty(len(characters), np.int32), np.zeros(len(ends), np.int64)
    pair = np.empty(len(characters), np.int32)  # piece of a symbol and the next one
    limit = np.uint64(alpha * 2.0**53)
    written, start = 0, 0
    for text in range(len(ends)):
        state, before = seeds[text], written
        while start < ends[text]:
            stop = start + 1
            while stop < ends[text] and characters[stop] != space:
                stop += 1
            # A word is processed in the place of its final ids.
            count, word, pairs = stop - start, ids[written:], pair[written:]
            for i in range(count):
                word[i] = characters[start + i]
            for i in range(count - 1):
                pairs[i] = _merged(table, word[i], word[i + 1])
            while True:
                chosen = -1
                for i in range(count - 1):
                    if pairs[i] < 0:
                        continue
                    drawn = _mix(state)
                    state += GOLDEN
                    if (drawn >> np.uint64(11)) < limit:
                        continue
                    if chosen < 0 or pairs[i] < pairs[chosen]:
                        chosen = i
                if chosen < 0:
                    break
                word[chosen] = pairs[chosen]
                count -= 1
                for i in range(chosen + 1, count):
                    word[i], pairs[i - 1] = word[i + 1], pairs[i]
                if chosen > 0:
                    pairs[chosen - 1] = _merged(table, word[chosen - 1], word[chosen])
                if chosen < count - 1:
                    pairs[chosen] = _merged(table, word[chosen], word[chosen + 1])
            written += count
            start = stop
        lengths[text] = written - before
    return ids[:written].copy(), lengths

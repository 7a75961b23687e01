"""Much text -> ids: a word that was seen before is looked up and not tokenized again.

Words are found, hashed and compared as bytes, compiled by numba. New ones are spelled (spelling.py)
or, where that is not enough, asked of SentencePiece.
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from m4.data.compiled import compiled
from m4.data.vocabulary.ragged import Ragged, Texts
from m4.data.vocabulary.spelling import Spelling
from m4.data.vocabulary.vocabulary import SPACE, Vocabulary

# About 15 MB, and the processor's caches still help. Beyond it everything is forgotten: the common
# words are soon known again.
MOST_WORDS = 200_000
# The columns of a word's entry: its hash; where its letters begin, and its ids. They end where the
# next word's begin. One row, because each is a wait for memory.
_HASH, _LETTERS, _IDS = 0, 1, 2


class WordEncoder:
    """`Vocabulary.encode` for whole corpora: the same ids, several times as fast.

    SentencePiece tokenizes each word of a text by itself, as long as no piece has a space inside.
    A vocabulary that is not so is asked for whole texts; and so it is where a text has the sign
    that SentencePiece writes for a space, whose neighbours are its own affair.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self._spelling = vocabulary, Spelling(vocabulary)
        self._forget()

    def _forget(self) -> None:
        self.words = 0  # that are known
        self._slots = np.full(1 << 10, -1, np.int32)
        self._entries = np.zeros((1, 3), np.int64)
        self._letters, self._ids = np.empty(0, np.uint8), np.empty(0, np.int32)

    def encode(self, texts: Texts) -> Ragged:
        """Texts -> ids, without eos."""
        if SPACE.encode() in texts.raw or not self.vocabulary.by_words:
            return Ragged.of(self.vocabulary.encode(texts.strings()))
        if self.words > MOST_WORDS:
            self._forget()
        known, most = self.words, texts.raw.count(b" ") + len(texts.starts)
        # Room for as many new words as there may be; what is not written costs no memory.
        letters = self._entries[known, _LETTERS] + len(texts.raw) + most
        self._entries = _with_room(self._entries, known + 1, known + 1 + most)
        self._letters = _with_room(self._letters, self._entries[known, _LETTERS], letters)
        numbers, words_of, self.words, self._slots = _number(
            np.frombuffer(texts.raw, np.uint8),
            texts.starts,
            texts.ends,
            self._slots,
            self._entries,
            self._letters,
            known,
            np.empty(most, np.int32),
        )
        if self.words > known:
            self._learn(known)
        return Ragged(*_looked_up(numbers, words_of, self._entries, self._ids))

    def _learn(self, known: int) -> None:
        """The ids of the words from number `known` on."""
        first, last = self._entries[known, _LETTERS], self._entries[self.words, _LETTERS]
        new = self._letters[first : last - 1].tobytes().decode()
        found, plain = self._spelling.encode(" " + new)
        others = list(compress(new.split(" "), ~plain))
        of_others = Ragged.of(self.vocabulary.encode(others))
        order = np.where(plain, np.cumsum(plain), len(found.lengths) + np.cumsum(~plain)) - 1
        found = Ragged.joined([found, of_others]).take(order)
        start = self._entries[known, _IDS]
        self._ids = _with_room(self._ids, start, start + len(found.ids))
        self._ids[start : start + len(found.ids)] = found.ids
        self._entries[known + 1 : self.words + 1, _IDS] = start + np.cumsum(found.lengths)


def _with_room(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """The array, or a larger one that begins with what is used of it."""
    if needed <= len(array):
        return array
    larger = np.empty((max(needed, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


@compiled
def _larger(slots, entries, words):
    """A table of twice the size with the same words."""
    mask = 2 * len(slots) - 1
    larger = np.full(2 * len(slots), -1, np.int32)
    for number in range(words):
        slot = entries[number, _HASH] & mask
        while larger[slot] >= 0:
            slot = (slot + 1) & mask
        larger[slot] = number
    return larger


@compiled
def _number(raw, starts, ends, slots, entries, letters, words, numbers):
    """The words between spaces of the texts raw[starts:ends] -> their numbers; new ones get one.

    slots: a hash table with open addressing, at most half full: numbers, -1 where it is free. A new
    word's hash and letters, with a space after them, are written into entries and letters. numbers:
    to write into. Returns them, how many each text has, how many are known now, and slots.
    """
    words_of = np.empty(len(starts), np.int64)
    written = 0
    for text in range(len(starts)):
        before, start = written, starts[text]
        while True:
            # FNV-1a, its upper half folded in: its low bits hang on the letters' low bits alone.
            value, end = np.uint64(0xCBF29CE484222325), start
            while end < ends[text] and raw[end] != 32:
                value = (value ^ np.uint64(raw[end])) * np.uint64(0x100000001B3)
                end += 1
            value = np.int64(value ^ (value >> np.uint64(32)))
            mask = len(slots) - 1
            slot = value & mask
            while slots[slot] >= 0:
                number = slots[slot]
                first = entries[number, _LETTERS]
                if (
                    entries[number, _HASH] == value
                    and entries[number + 1, _LETTERS] - first == end - start + 1
                ):
                    same = 0
                    while same < end - start and letters[first + same] == raw[start + same]:
                        same += 1
                    if same == end - start:
                        break
                slot = (slot + 1) & mask
            number = slots[slot]
            if number < 0:
                number = np.int32(words)
                slots[slot] = number
                entries[number, _HASH] = value
                first = entries[number, _LETTERS]
                for i in range(end - start):
                    letters[first + i] = raw[start + i]
                letters[first + end - start] = 32
                words += 1
                entries[words, _LETTERS] = first + end - start + 1
                if 2 * words > len(slots):
                    slots = _larger(slots, entries, words)
            numbers[written] = number
            written += 1
            if end == ends[text]:
                break
            start = end + 1
        words_of[text] = written - before
    return numbers[:written], words_of, words, slots


@compiled
def _looked_up(numbers, words_of, entries, ids):
    """The ids of texts of so many words each, and how many each has."""
    lengths = np.zeros(len(words_of), np.int64)
    word, total = 0, 0
    for text in range(len(words_of)):
        for _ in range(words_of[text]):
            number = numbers[word]
            lengths[text] += entries[number + 1, _IDS] - entries[number, _IDS]
            word += 1
        total += lengths[text]
    found, at = np.empty(total, np.int32), 0
    for number in numbers:
        for i in range(entries[number, _IDS], entries[number + 1, _IDS]):
            found[at] = ids[i]
            at += 1
    return found, lengths

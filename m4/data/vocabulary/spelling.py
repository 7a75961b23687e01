"""Words -> ids by the vocabulary's merges alone, where nothing else of SentencePiece has a say."""

from __future__ import annotations

import sys
import unicodedata

import numpy as np
import numpy.typing as npt

from m4.data.vocabulary.bpe_dropout import Dropout
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.vocabulary import SPACE, Vocabulary

_JAMO = ((0x1100, 0x11FF), (0xA960, 0xA97F), (0xD7B0, 0xD7FF))


class Spelling:
    """The best segmentation of words of plain characters: a tenth of SentencePiece's time.

    Plain: has a piece, and normalization leaves it alone next to whatever other plain ones. So
    marks and Hangul's parts are not, which join what is before them, nor '<', which begins tags.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._merges = Dropout(vocabulary)
        first = vocabulary.byte_ids.stop
        pieces = {p: i for i, p in enumerate(vocabulary.pieces) if i >= first and _may_be_plain(p)}
        self._ids = np.full(sys.maxunicode + 1, -1, np.int32)
        for (piece, i), alone in zip(pieces.items(), vocabulary.encode(list(pieces)), strict=True):
            if "".join(vocabulary.pieces[of] for of in alone) == SPACE + piece:
                self._ids[ord(piece)] = i
        if SPACE in vocabulary.pieces:
            self._ids[ord(" ")] = vocabulary.pieces.index(SPACE)

    def encode(self, words: str) -> tuple[Ragged, npt.NDArray[np.bool_]]:
        """Words, each with a space before it -> the ids of plain ones; which words are plain."""
        points = np.frombuffer(words.encode("utf-32-le"), np.uint32)
        ids = self._ids[points]
        starts = np.flatnonzero(points == ord(" "))
        lengths = np.diff(starts, append=len(points))
        plain = (np.minimum.reduceat(ids, starts) >= 0) & (lengths > 1)
        ends = np.cumsum(lengths[plain])
        return self._merges.best(ids[np.repeat(plain, lengths)], ends), plain


def _may_be_plain(piece: str) -> bool:
    return (
        len(piece) == 1
        and piece not in (SPACE, "<")
        and unicodedata.category(piece)[0] not in "MZC"
        and unicodedata.is_normalized("NFKC", piece)
        and not any(low <= ord(piece) <= high for low, high in _JAMO)
    )

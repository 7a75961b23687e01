"""Clean: no training pair whose English side is in anybody's dev or test set."""

from __future__ import annotations

import hashlib
import unicodedata


class HeldOut:
    """The English sentences of all dev and test sets, compared without case, width and spacing.

    An overlap counts across languages: a model that has seen a test sentence's English with
    another language has seen what it must produce.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, english: str) -> None:
        self._seen.add(_digest(english))

    def __contains__(self, english: str) -> bool:
        return _digest(english) in self._seen


def _digest(text: str) -> bytes:
    # Eight bytes a sentence, so that large test sets stay small in memory.
    normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.blake2b(normal.encode(), digest_size=8).digest()

"""Splitting of corpora without splits, by a hash of the first side, which is mostly English.

A sentence is in the same split in every language and file, so no English test sentence is in any
language's training pairs.
"""

import unicodedata
from hashlib import blake2b

from m4.settings import SettingError

_ALL = 1 << 64


def text_hash(text: str) -> int:
    """Returns a 64-bit hash of a text that is equal in all processes, unlike Python's own."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def normal(text: str) -> str:
    """Returns a sentence without case, width and spacing, for comparisons."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class HashSplit:
    """Rule that one in `dev_every` first sentences is dev, one in `test_every` test; 0 means none.

    Sentences that differ only in case, width or spacing are the same.
    """

    def __init__(self, owner: str, dev_every: int, test_every: int) -> None:
        """Checks the numbers; `owner` is the source's class, for messages."""
        for name, every in (("dev_every", dev_every), ("test_every", test_every)):
            if every < 0 or every == 1:
                allowed = "0 (none) or at least 2 (one in so many)"
                raise SettingError(f"{owner}.{name}", every, allowed)
        self.dev_every, self.test_every = dev_every, test_every
        self._test_below = _ALL // test_every if test_every else 0
        self._dev_below = self._test_below + (_ALL // dev_every if dev_every else 0)
        if self._dev_below == _ALL:
            allowed = "above 2 where dev_every is 2: else none is left to train on"
            raise SettingError(f"{owner}.test_every", 2, allowed)

    def __bool__(self) -> bool:
        return bool(self.dev_every or self.test_every)

    def __call__(self, first: str) -> str:
        """Returns 'train', 'dev' or 'test'."""
        value = text_hash(normal(first))
        if value < self._test_below:
            return "test"
        return "dev" if value < self._dev_below else "train"

    def identity(self) -> dict:
        return {"dev_every": self.dev_every, "test_every": self.test_every}

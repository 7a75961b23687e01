"""A made-up corpus for tests: languages that are English with other words, of given sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from m4.data.sources import Pair

_TEXT = """
the a red blue old new small large house river stone tree bird fish cloud night sun road
sees finds takes gives under over with from to 7 12 305 two three and or
"""
_WORDS = _TEXT.split()


class Made:
    """A Source: sizes[language] training pairs; English of dev and test is in no training set."""

    def __init__(self, sizes: dict[str, int], held_out: int = 20, seed: int = 0) -> None:
        self.sizes, self.held_out, self.seed = sizes, held_out, seed

    def languages(self) -> list[str]:
        return list(self.sizes)

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        size = self.sizes[language] if split == "train" else self.held_out
        for number in range(size):
            rng = random.Random(f"{self.seed} {split} {language} {number}")
            words = rng.choices(_WORDS, k=rng.randint(2, 14))
            # The number makes every sentence, and so every pair, another one.
            english = " ".join([*words, split, language, str(number)])
            yield Pair(english, " ".join(word[::-1] + language[0] for word in english.split()))

    def subsets(self, language: str, split: str) -> dict[str, list[bool]]:
        return {"short": [len(pair.english) < 40 for pair in self.pairs(language, split)]}

    def identity(self) -> dict:
        return {"source": "made", "seed": self.seed, "by_language": self.sizes}

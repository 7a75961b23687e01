"""A made-up corpus for tests: languages that are English with other words, of given sizes."""

import random
from collections.abc import Iterator

from m4.data.directions import key_of, pair_of, split_direction
from m4.data.sources import Pair

_TEXT = """
the a red blue old new small large house river stone tree bird fish cloud night sun road
sees finds takes gives under over with from to 7 12 305 two three and or
"""
_WORDS = _TEXT.split()


class Made:
    """A Source: sizes["gl"] training pairs of en-gl, sizes["fr-wo"] of fr-wo.

    What is English in dev and test is in no training set.
    """

    def __init__(self, sizes: dict[str, int], held_out: int = 20, seed: int = 0) -> None:
        self.sizes, self.held_out, self.seed = sizes, held_out, seed

    def language_pairs(self) -> list[str]:
        return [*map(pair_of, self.sizes)]

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        pair = pair_of(pair)
        key = key_of(pair)
        size = self.sizes[key] if split == "train" else self.held_out
        for number in range(size):
            rng = random.Random(f"{self.seed} {split} {key} {number}")
            words = rng.choices(_WORDS, k=rng.randint(2, 14))
            # The number makes every sentence, and so every pair, another one.
            english = " ".join([*words, split, key, str(number)])
            yield Pair(*(in_language(english, code) for code in split_direction(pair)))

    def subsets(self, pair: str, split: str) -> dict[str, list[bool]]:
        return {"short": [len(texts.first) < 40 for texts in self.pairs(pair, split)]}

    def identity(self) -> dict:
        sizes = {pair_of(name): size for name, size in self.sizes.items()}
        return {"source": "made", "seed": self.seed, "by_pair": sizes}


def in_language(english: str, code: str) -> str:
    """Returns an English sentence as the made-up language of a code says it."""
    if code == "en":
        return english
    return " ".join(word[::-1] + code[0] for word in english.split())

"""The dev and test sentences of a corpus, by direction."""

from collections.abc import Iterable

from m4.data.cache import Cache
from m4.data.preprocess import split_direction


def language_of(direction: str) -> str:
    """The side of a direction that is not English: "gl" of "en-gl" and of "gl-en"."""
    source, target = split_direction(direction)
    return target if source == "en" else source


def split_pairs(
    cache: Cache, directions: Iterable[str], split: str
) -> dict[str, list[tuple[str, str]]]:
    """direction -> (source, reference) of every sentence of the split, in its order, untagged."""
    result = {}
    for direction in directions:
        pairs = cache.pairs(language_of(direction), split)
        if direction.startswith("en-"):
            result[direction] = [(pair.english, pair.foreign) for pair in pairs]
        else:
            result[direction] = [(pair.foreign, pair.english) for pair in pairs]
    return result

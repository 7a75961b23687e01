"""Dev and test sentences of a corpus by direction."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from m4.data.cache.cache import Cache
from m4.data.directions import key_of, pair_of, sides_of, split_direction, zero_shot_directions
from m4.settings import InputError

_Row = TypeVar("_Row")


def split_pairs(
    cache: Cache, directions: Iterable[str], split: str
) -> dict[str, list[tuple[str, str]]]:
    """Returns direction -> (source, reference) of every sentence of a split, untagged."""
    result = {}
    for direction in directions:
        source, target = sides_of(direction)
        pairs = cache.pairs(pair_of(direction), split)
        result[direction] = [(getattr(pair, source), getattr(pair, target)) for pair in pairs]
    return result


def n_way_pairs(cache: Cache, direction: str, split: str) -> list[tuple[str, str]]:
    """Returns (source, reference) per test sentence of a direction, even without its own pairs.

    Such sentences translate the same third sentence: in English, or the first language with any.
    """
    source, target = split_direction(direction)

    def pairs(name: str) -> list[tuple[str, str]]:
        known = pair_of(name) in cache.language_pairs()
        return split_pairs(cache, [name], split)[name] if known else []

    if found := pairs(direction):
        return found
    for third in ["en", *cache.languages()]:
        if third in (source, target):
            continue
        # The first of several translations counts.
        sources, targets = (dict(reversed(pairs(f"{third}-{side}"))) for side in (source, target))
        texts = [text for text in dict(pairs(f"{third}-{source}")) if text in targets]
        if texts:
            return [*dict.fromkeys((sources[text], targets[text]) for text in texts)]
    return []


class Portion(NamedTuple):
    """The part of a split that is translated and scored."""

    split: str
    sentences: int | None = None  # per direction, evenly spaced; None: all
    directions: tuple[str, ...] = ()
    test_sentences: int | None = None  # Maximum of a test set; not in file names

    @property
    def name(self) -> str:
        """Name in file names: "dev", or "dev200" for 200 sentences per direction."""
        return self.split if self.sentences is None else f"{self.split}{self.sentences}"

    def pairs(self, cache: Cache) -> dict[str, list[tuple[str, str]]]:
        """Returns direction -> (source, reference) of the chosen sentences.

        Directions without training pairs are included if they are asked for.
        """
        trained = cache.directions
        if unknown := {*self.directions} - {*trained, *zero_shot_directions(trained)}:
            raise InputError(
                f"--directions: no {', '.join(sorted(unknown))}; there are {', '.join(trained)}"
            )
        tested = [d for d in self.directions or trained
                  if d in trained and cache.size(pair_of(d), self.split)]  # fmt: skip
        pairs = split_pairs(cache, tested, self.split)
        others = [d for d in self.directions if d not in tested]
        pairs |= {d: found for d in others if (found := n_way_pairs(cache, d, self.split))}
        return {direction: self.chosen(each) for direction, each in pairs.items()}

    def subsets(self, cache: Cache) -> dict[str, dict[str, Sequence[bool]]]:
        """Returns pair of languages -> the marks of the chosen sentences by subset."""
        marks = {pair: cache.subsets(pair, self.split) for pair in cache.language_pairs()}
        return {pair: {name: self.chosen(each) for name, each in of.items()}
                for pair, of in marks.items()}  # fmt: skip

    def chosen(self, rows: Sequence[_Row]) -> list[_Row]:
        """Selects the rows of the chosen sentences from those of the split."""
        most = self.test_sentences if self.split == "test" else None
        count = min(self.sentences or len(rows), most or len(rows), len(rows))
        return [rows[(2 * number + 1) * len(rows) // (2 * count)] for number in range(count)]


def train_pairs(cache: Cache) -> dict[str, int]:
    """Returns `key_of` a pair of languages -> number of its training pairs."""
    return {key_of(pair): cache.size(pair, "train") for pair in cache.language_pairs()}


def pair_sizes(known: Mapping[str, int], directions: Iterable[str]) -> dict[str, int]:
    """Returns `train_pairs` for the directions' language pairs, including untrained ones.

    An untrained pair gets the smaller size of its two languages' pairs with English.
    """
    sizes = {key_of(pair_of(each)): [known.get(code, 0) for code in split_direction(each)]
             for each in directions}  # fmt: skip
    return {key: known.get(key, min(of)) for key, of in sizes.items()}


def check_held_out(cache: Cache) -> None:
    """Raises InputError for a language pair without dev or test sentences."""
    for split in ("dev", "test"):
        pairs = cache.tested_pairs()
        if lacking := [key_of(pair) for pair in pairs if not cache.size(pair, split)]:
            raise InputError(
                f"no {split} sentences of {', '.join(lacking)}: bilingual baselines need them; "
                "leave these languages out (CorpusSpec.languages), or add the files"
            )

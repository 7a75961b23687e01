"""Measures how well a vocabulary serves each language: pieces a sentence, a word, a character.

A language whose text falls apart into bytes has long sentences and little that a model can learn
from. Remedies are a larger vocabulary, and a higher temperature of the text that it is trained on.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from rich.table import Table

from m4.data.cache.cache import Cache
from m4.data.directions import ROLES, SIDES, split_direction
from m4.data.languages import describe
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.vocabulary import UNK_ID, Vocabulary

# Share of bytes among the pieces above which a language stands out.
MANY_BYTES = 0.01
# Titles and formats of a row's numbers.
COLUMNS = {
    "sentences": "{:,}",
    "pieces a sentence": "{:.2f}",
    "a word": "{:.2f}",
    "a character": "{:.2f}",
    "bytes": "{:.2%}",
    "unknown": "{:.2%}",
    "characters with a piece": "{:.2%}",
}


class Row(NamedTuple):
    """Numbers of a vocabulary on some sentences of a language, without tag and eos."""

    language: str  # its code
    vocabulary: str  # "shared", "source" or "target"
    sentences: int
    pieces_per_sentence: float
    # Words are what stands between spaces: in scripts that write none, whole stretches of text.
    pieces_per_word: float
    # Characters are counted in the normal form of sources, without spaces.
    pieces_per_character: float
    byte_share: float  # share of the pieces that are bytes
    unknown_share: float  # share of the pieces that are the unknown piece
    coverage: float  # share of the characters that are not spelled in bytes


def measure(cache: Cache, sentences: int = 2000) -> list[Row]:
    """Returns a row for each language and vocabulary.

    Where sources and targets have separate vocabularies, each is measured on the languages that it
    is made for.

    Args:
        sentences: Training sentences of each language, at even distances, from all its pairs.
    """
    codes = cache.languages()
    names = cache.language_pairs()
    paired = Counter(code for pair in names for code in split_direction(pair))
    texts: dict[str, list[str]] = {code: [] for code in codes}
    for name in names:
        size = cache.size(name, "train")
        pairs = list(islice(cache.pairs(name, "train"), 0, None, max(size // sentences, 1)))
        pairs = pairs[:sentences]
        for side, code in zip(SIDES, split_direction(name), strict=True):
            share = -(-sentences // paired[code])
            some = pairs[:: max(len(pairs) // share, 1)][:share]
            texts[code] += [getattr(pair, side) for pair in some]
    if not cache.separate:
        vocabularies = {"shared": (cache.source_vocabulary, codes)}
    else:
        both = cache.source_vocabulary, cache.target_vocabulary
        served = zip(*map(split_direction, cache.directions), strict=True)
        vocabularies = dict(zip(ROLES, zip(both, map(set, served), strict=True), strict=True))
    return [
        measure_texts(vocabulary, name, code, texts[code])
        for name, (vocabulary, languages) in vocabularies.items()
        for code in codes
        if code in languages
    ]


def measure_texts(vocabulary: Vocabulary, name: str, language: str, texts: Sequence[str]) -> Row:
    """Returns the row of some sentences of a language, for the vocabulary called `name`."""
    words = [word for text in vocabulary.normalised(texts) for word in text.split()]
    characters = max(sum(map(len, words)), 1)
    ids = Ragged.of(vocabulary.encode(texts)).ids
    bytes_ = vocabulary.byte_ids
    values = ids[(ids >= bytes_.start) & (ids < bytes_.stop)] - bytes_.start
    # In UTF-8 the first byte of a character is none of 0x80 ... 0xBF.
    spelled = int(np.count_nonzero(values & 0xC0 != 0x80))
    return Row(
        language,
        name,
        sentences=len(texts),
        pieces_per_sentence=len(ids) / max(len(texts), 1),
        pieces_per_word=len(ids) / max(len(words), 1),
        pieces_per_character=len(ids) / characters,
        byte_share=len(values) / max(len(ids), 1),
        unknown_share=int(np.count_nonzero(ids == UNK_ID)) / max(len(ids), 1),
        coverage=1 - spelled / characters,
    )


def table(rows: Iterable[Row]) -> Table:
    """Returns the rows as a table for the terminal."""
    made = Table("language", "vocabulary", title="What the vocabulary makes of each language")
    for title in COLUMNS:
        made.add_column(title, justify="right")
    for row in rows:
        name = f"{row.language} {describe(row.language).name}"
        style = "yellow" if row.byte_share > MANY_BYTES else None
        cells = (form.format(one) for form, one in zip(COLUMNS.values(), row[2:], strict=True))
        made.add_row(name, row.vocabulary, *cells, style=style)
    return made

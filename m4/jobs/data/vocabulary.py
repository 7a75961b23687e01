"""`m4 data vocabulary`: measures how the vocabulary splits each language.

Text that splits into bytes makes long sequences: raise CorpusSpec.vocabulary_size or
vocabulary_temperature.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from m4.jobs import command, streams
from m4.settings import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from m4.data.cache.cache import Cache

EXAMPLE = "m4 data vocabulary --gin_file=gin_configs/demo.gin"
_COLUMNS = {"sentences": "{:,}", "pieces a sentence": "{:.2f}", "a word": "{:.2f}"}
_COLUMNS |= {"a character": "{:.2f}", "bytes": "{:.2%}"}


class Row(NamedTuple):
    """Statistics of a vocabulary on a language's training sentences, without tag and eos."""

    language: str  # its code
    vocabulary: str  # "shared", "source" or "target"
    sentences: int
    pieces_per_sentence: float
    # Words are separated by spaces; in scripts without spaces, a word is a whole stretch of text.
    pieces_per_word: float
    pieces_per_character: float  # not counting spaces
    byte_share: float  # share of the pieces that are bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    text = "sentences per language (default: 2000)"
    parser.add_argument("--sentences", type=int, default=2000, help=text)


def run(arguments: argparse.Namespace) -> None:
    """Prints a table of the languages, those with the most bytes first."""
    if arguments.sentences < 1:
        raise InputError(f"--sentences={arguments.sentences}: must be at least 1")
    with command.opened(arguments, "data", computes=False) as run:
        from rich.table import Table

        from m4.data.languages import title_of
        from m4.jobs.corpus import arrays, open_corpus

        rows = measure(open_corpus(run.experiment, arrays), arguments.sentences)
    table = Table("language", "vocabulary")
    for title in _COLUMNS:
        table.add_column(title, justify="right")
    for row in sorted(rows, key=lambda row: -row.byte_share):
        cells = (form.format(one) for form, one in zip(_COLUMNS.values(), row[2:], strict=True))
        table.add_row(f"{row.language} {title_of(row.language)}", row.vocabulary, *cells)
    streams.console().print(table)


def measure(cache: Cache, sentences: int) -> list[Row]:
    """Returns a row for each vocabulary and each of its languages.

    Args:
        sentences: Number of training sentences per language, evenly spaced.
    """
    import numpy as np

    from m4.data.directions import ROLES, split_direction
    from m4.data.vocabulary.vocabulary import EOS_ID

    sizes, firsts = cache.manifest["sentences"]["train"], cache.first_sentences("train")
    served: dict[str, Iterable[str]] = {"shared": cache.languages()}
    if cache.separate:
        sides = zip(*map(split_direction, cache.directions), strict=True)
        served = dict(zip(ROLES, sides, strict=True))
    rows = []
    for name, languages in served.items():
        target = name == "target"
        vocabulary = cache.target_vocabulary if target else cache.source_vocabulary
        stored = cache.sentences("train", "target" if target else "source")
        for code in dict.fromkeys(languages):
            size = min(sentences, sizes[code])
            found = stored.take(firsts[code] + np.arange(size) * sizes[code] // max(size, 1))
            ids = found.ids[found.ids != EOS_ID]  # a source of ids has kept the text
            words = " ".join(vocabulary.decode(found.rows())).split()
            counts = size, len(words), sum(map(len, words))
            sentence, word, character = (len(ids) / max(count, 1) for count in counts)
            share = float(np.isin(ids, vocabulary.byte_ids).sum()) / max(len(ids), 1)
            rows.append(Row(code, name, size, sentence, word, character, share))
    return rows

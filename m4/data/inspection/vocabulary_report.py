"""How well a vocabulary serves each language: pieces a sentence, a word, a character; bytes.

A language whose text falls apart into bytes has long sentences and little that a model can learn
from. Remedies are a larger vocabulary, and a higher temperature of the text that it is trained on.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from m4 import html
from m4.data.cache.cache import Cache
from m4.data.cache.tokens import ROLES
from m4.data.directions import SIDES, SIDES_OF
from m4.data.languages import describe
from m4.data.vocabulary.ragged import Ragged
from m4.data.vocabulary.vocabulary import UNK_ID, Vocabulary
from m4.storage.files import write_text

NAME = "vocabulary_report"
_TEMPLATE = Path(__file__).with_name("vocabulary_report.html.j2")
COLUMNS = {
    "sentences": "sentences",
    "pieces_per_sentence": "pieces a sentence",
    "pieces_per_word": "a word",
    "pieces_per_character": "a character",
    "byte_share": "bytes",
    "unknown_share": "unknown",
    "coverage": "characters with a piece",
}


@dataclass(frozen=True)
class Row:
    """What a vocabulary makes of some sentences of a language.

    Attributes:
        language: its code; "en" is English.
        vocabulary: "shared", "source" or "target".
        pieces: ids of all sentences, without tag and eos.
        words: what stands between spaces; in scripts that write none, whole stretches of text.
        characters: without spaces, in compatibility form (NFKC).
        byte_pieces: ids that are bytes; spelled: the characters that they spell.
        unknown: ids of the unknown piece (none, where there are bytes to fall back to).
    """

    language: str
    vocabulary: str
    sentences: int
    pieces: int
    words: int
    characters: int
    byte_pieces: int
    spelled: int
    unknown: int

    def rates(self) -> dict[str, float]:
        """The columns of the report: COLUMNS. Shares are of the pieces, coverage of characters."""
        return {
            "sentences": self.sentences,
            "pieces_per_sentence": self.pieces / max(self.sentences, 1),
            "pieces_per_word": self.pieces / max(self.words, 1),
            "pieces_per_character": self.pieces / max(self.characters, 1),
            "byte_share": self.byte_pieces / max(self.pieces, 1),
            "unknown_share": self.unknown / max(self.pieces, 1),
            "coverage": 1 - self.spelled / max(self.characters, 1),
        }


def measure(cache: Cache, sentences: int = 2000) -> list[Row]:
    """A row a language and vocabulary, English first.

    Of each language up to `sentences` training sentences, at even distances; of English as many,
    from all of its files. Where sources and targets have separate vocabularies, each is asked for
    the languages that it is made for.
    """
    vocabularies = {"shared": cache.source_vocabulary}
    served = {"shared": SIDES}
    if cache.separate:
        vocabularies = {"source": cache.source_vocabulary, "target": cache.target_vocabulary}
        served = {role: SIDES_OF[cache.mixture][role] for role in ROLES}
    english, translation = _texts(cache, sentences)
    rows = []
    for name, vocabulary in vocabularies.items():
        texts = ({"en": english} if "english" in served[name] else {}) | (
            translation if "translation" in served[name] else {}
        )
        rows += [measure_texts(vocabulary, name, code, of) for code, of in texts.items()]
    return rows


def _texts(cache: Cache, sentences: int) -> tuple[list[str], dict[str, list[str]]]:
    """English sentences, and those of each language."""
    codes = cache.languages()
    english, translation = [], {}
    for code in codes:
        size = cache.size(code, "train")
        # At even distances, as many as are wanted or a few more.
        pairs = list(islice(cache.pairs(code, "train"), 0, None, max(size // sentences, 1)))
        translation[code] = [pair.translation for pair in pairs[:sentences]]
        share = -(-sentences // len(codes))
        english += [pair.english for pair in pairs[:: max(len(pairs) // share, 1)][:share]]
    return english, translation


def measure_texts(vocabulary: Vocabulary, name: str, language: str, texts: Sequence[str]) -> Row:
    """The row of some sentences; name: of the vocabulary."""
    normal = [unicodedata.normalize("NFKC", text).split() for text in texts]
    ids = Ragged.of(vocabulary.encode(texts)).ids
    bytes_ = vocabulary.byte_ids
    values = ids[(ids >= bytes_.start) & (ids < bytes_.stop)] - bytes_.start
    return Row(
        language=language,
        vocabulary=name,
        sentences=len(texts),
        pieces=len(ids),
        words=sum(map(len, normal)),
        characters=sum(len(word) for words in normal for word in words),
        byte_pieces=len(values),
        # UTF-8: a character's first byte is none of 0x80 ... 0xBF.
        spelled=int(np.count_nonzero(values & 0xC0 != 0x80)),
        unknown=int(np.count_nonzero(ids == UNK_ID)),
    )


def table(rows: Iterable[Row]) -> Table:
    """For the terminal."""
    made = Table("language", "vocabulary", title="What the vocabulary makes of each language")
    for title in COLUMNS.values():
        made.add_column(title, justify="right")
    for row in rows:
        cells = [shown(name, value) for name, value in row.rates().items()]
        made.add_row(f"{row.language} {describe(row.language).name}", row.vocabulary, *cells)
    return made


def shown(column: str, value: float) -> str:
    """A number as its column has it."""
    if column == "sentences":
        return f"{value:,}"
    return f"{value:.2%}" if column.endswith("share") or column == "coverage" else f"{value:.2f}"


def spelled_out(rows: Iterable[Row], above: float) -> list[Row]:
    """The rows with more than this share of bytes, the worst first."""
    found = [row for row in rows if row.rates()["byte_share"] > above]
    return sorted(found, key=lambda row: -row.rates()["byte_share"])


def write(folder: Path, cache: Cache, rows: Sequence[Row], warn_above: float) -> list[Path]:
    """Writes vocabulary_report.json and vocabulary_report.html; returns their paths."""
    about = {
        role: {key: value for key, value in made.items() if key != "fingerprint"}
        for role, made in cache.manifest["vocabularies"].items()
    }
    data: dict[str, Any] = {
        "fingerprint": cache.vocabulary.fingerprint,
        "vocabularies": about,
        "warn_above": warn_above,
        "rows": [
            {"language": row.language, "vocabulary": row.vocabulary, **row.rates()} for row in rows
        ],
    }
    page = html.render(
        _TEMPLATE,
        {"name_of": lambda code: describe(code).name},
        **data,
        columns=COLUMNS,
        shown=shown,
    )
    paths = [folder / f"{NAME}.json", folder / f"{NAME}.html"]
    write_text(paths[0], json.dumps(data, indent=1, ensure_ascii=False))
    write_text(paths[1], page)
    return paths

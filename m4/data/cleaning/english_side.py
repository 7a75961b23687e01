"""Finds which side of the pairs is English, by frequent words and by the script."""

import re
from collections import Counter

import numpy as np

from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES
from m4.data.languages import NO_ENGLISH
from m4.data.scripts import COMMON, NUMBERS, script_numbers
from m4.settings import InputError

# Frequent English words that are rare in other languages.
_WORDS = """
the and you that she they what this with are was were your his her not which when would there from
it's i'm don't can could my has had been their will him who how why
"""
# Frequent words of languages in Latin letters that are not English. In Tatoeba at most 0.2% of the
# words of English are of these, and 3% or more of those of nearly all other languages.
_OTHERS = """
aku ang ar az að aš bir bu che co czy có da das de der det di du dut een egy ei ek el en er es est
et että ez ha hij hogy hän hänen il inte ir ist için ja jag je jeg jest jis jos ka kas không la là
le ma mi mihi minä mé mı na ne nem ni nicht nie nu não ole onun para que sa se si się som sunt să
tidak tu tá të tôi un unha ut van var você vous ya yang yeye yra zuen ég él że
"""
_ENGLISH, _OTHER = frozenset(_WORDS.split()), frozenset(_OTHERS.split())
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
# A side is of a language if its share of such words is at least this one, and twice that of the
# other side, or of English words.
_LEAST_SHARE, _LEAST_WORDS, _MOST_WORDS = 0.04, 50, 20_000
_LEAST_OTHER = 0.03
NEITHER = "neither"
SAID = {
    NEITHER: NO_ENGLISH,
    "translation": "English is on the side of the translations: swap the columns "
    "(TSV: Tsv.english_column = 2)",
}


class EnglishSides:
    """Finds which side of a corpus is English."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], dict[str, Counter[str]]] = {}

    def add(self, language: str, split: str, chunk: Chunk) -> None:
        """Counts the words of a chunk of pairs, up to 20,000 a side of a language and split."""
        counts = self._counts.setdefault((language, split), {side: Counter() for side in SIDES})
        for side, count in counts.items():
            if count["words"] < _MOST_WORDS:
                words = _WORD.findall(" ".join(chunk.side(side)).casefold().replace("’", "'"))
                scripts = np.bincount(script_numbers(chunk.code_points(side)), minlength=256)
                scripts[[NUMBERS[script] for script in COMMON]] = 0
                count["words"] += len(words)
                count["english"] += sum(word in _ENGLISH for word in words)
                count["other"] += sum(word in _OTHER for word in words)
                count["letters"] += int(scripts.sum())
                count["latin"] += int(scripts[NUMBERS["Latn"]])

    def found(self) -> dict[tuple[str, str], str]:
        """Returns (language, split) -> the side that clearly is English.

        It is NEITHER where the side of English clearly is another language, and the other side is
        not English.
        """
        return {of: side for of in self._counts if (side := self._side(*of))}

    def _side(self, language: str, split: str) -> str | None:
        counts = self._counts.get((language, split))
        if counts is None:
            return None
        shares = {side: _share(count, "english") for side, count in counts.items()}
        more, less = sorted(SIDES, key=lambda side: -shares[side])
        if shares[more] >= max(_LEAST_SHARE, 2 * shares[less]):
            return more
        taken = counts["english"]
        other_script = 2 * taken["latin"] < taken["letters"] and taken["words"] >= _LEAST_WORDS
        other_words = _share(taken, "other") >= max(_LEAST_OTHER, 2 * shares["english"])
        return NEITHER if other_script or other_words else None

    def check(self, language: str, split: str) -> None:
        """Raises InputError where English is on the side of the translations, or on neither."""
        side = self._side(language, split)
        if side in SAID:
            raise InputError(f"{language}, {split}: {SAID[side]}")


def _share(count: Counter[str], words: str) -> float:
    return count[words] / count["words"] if count["words"] >= _LEAST_WORDS else 0.0

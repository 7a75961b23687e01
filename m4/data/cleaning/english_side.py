"""Checks that a text is in the language it claims, by English words and by the script."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from m4.data.cleaning.chunk import Chunk
from m4.data.directions import SIDES, split_direction
from m4.data.languages import describe, is_english
from m4.data.scripts import COMMON, NUMBERS, script_numbers, scripts_of
from m4.settings import InputError

# Frequent English words that are rare in other languages.
_WORDS = """
the and you that she they what this with are was were your his her not which when would there from
it's i'm don't can could my has had been their will him who how why
"""
# Frequent words of other languages in Latin script. In Tatoeba, they are at most 0.2% of the words
# of English, and 3% or more of the words of nearly all other languages.
_OTHERS = """
aku ang ar az að aš bir bu che co czy có da das de der det di du dut een egy ei ek el en er es est
et että ez ha hij hogy hän hänen il inte ir ist için ja jag je jeg jest jis jos ka kas không la là
le ma mi mihi minä mé mı na ne nem ni nicht nie nu não ole onun para que sa se si som sunt să
tidak tu tá të tôi un unha ut van var você vous ya yang yeye yra zuen ég él że
"""
_ENGLISH, _OTHER = frozenset(_WORDS.split()), frozenset(_OTHERS.split())
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
# A side is in a language if its share of such words is at least this, and twice that of the other
# side or of English words.
_LEAST_SHARE, _LEAST_WORDS, _MOST_WORDS = 0.04, 50, 20_000
_LEAST_OTHER = 0.03
NO_ENGLISH = "the text of en is not English; other pairs are named by their languages, as fr-wo"
SWAPPED = (
    "English is on the side of the translations: swap the columns (TSV: Tsv.english_column = 2)"
)


class EnglishSides:
    """Finds sides of a corpus that are clearly not in the language that they claim."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], dict[str, Counter]] = {}

    def add(self, pair: str, split: str, chunk: Chunk) -> None:
        """Counts the words of a chunk, up to 20,000 per side of a pair and split."""
        counts = self._counts.setdefault((pair, split), {side: Counter() for side in SIDES})
        for side, count in counts.items():
            if count["words"] < _MOST_WORDS:
                words = _WORD.findall(" ".join(chunk.side(side)).casefold().replace("’", "'"))
                scripts = np.bincount(script_numbers(chunk.code_points(side)), minlength=256)
                scripts[[NUMBERS[script] for script in COMMON]] = 0
                count["words"] += len(words)
                count["english"] += sum(word in _ENGLISH for word in words)
                count["other"] += sum(word in _OTHER for word in words)
                count["letters"] += int(scripts.sum())
                for script in np.flatnonzero(scripts).tolist():
                    count[script] += int(scripts[script])

    def read(self, pair: str, split: str, chunks: Iterable[Chunk]) -> None:
        """Counts like `add` on all chunks, but stops reading when it has enough."""
        for chunk in chunks:
            self.add(pair, split, chunk)
            if min(of["words"] for of in self._counts[pair, split].values()) >= _MOST_WORDS:
                break

    def english(self, pair: str, split: str) -> str | None:
        """Returns the side that is clearly English, "first" or "second"."""
        if (counts := self._counts.get((pair, split))) is None:
            return None
        shares = {side: _share(count, "english") for side, count in counts.items()}
        more, less = sorted(SIDES, key=lambda side: -shares[side])
        return more if shares[more] >= max(_LEAST_SHARE, 2 * shares[less]) else None

    def wrong(self, pair: str, split: str) -> str | None:
        """Describes what is clearly wrong with the languages of a pair, or returns None."""
        if (counts := self._counts.get((pair, split))) is None:
            return None
        english = self.english(pair, split)
        for side, language in zip(SIDES, split_direction(pair), strict=True):
            if english == side and not is_english(language):
                return SWAPPED if pair.startswith("en-") else f"the text of {language} is English"
            if language == "en" and english is None and _is_other(counts[side]):
                return NO_ENGLISH
            if not pair.startswith("en-") and _is_in_another_script(counts[side], language):
                return f"the text of {language} is not in the letters of {describe(language).name}"
        return None

    def found(self) -> dict[tuple[str, str], str]:
        """Returns (pair, split) -> description of what is wrong, for all that have a fault."""
        return {of: said for of in self._counts if (said := self.wrong(*of))}

    def check(self, pair: str, split: str) -> None:
        """Raises InputError if a side is clearly in another language than it claims."""
        if said := self.wrong(pair, split):
            raise InputError(f"{pair}, {split}: {said}")


def _is_other(count: Counter) -> bool:
    """Returns whether a text that should be English clearly is not."""
    other_script = 2 * count[NUMBERS["Latn"]] < count["letters"] and count["words"] >= _LEAST_WORDS
    return other_script or _share(count, "other") >= max(_LEAST_OTHER, 2 * _share(count, "english"))


def _is_in_another_script(count: Counter, language: str) -> bool:
    """Returns whether most letters of a text are in none of its language's scripts."""
    scripts = scripts_of(language)
    if scripts is None or count["words"] < _LEAST_WORDS:
        return False
    return 2 * sum(count[NUMBERS[script]] for script in scripts) < count["letters"]


def _share(count: Counter, words: str) -> float:
    return count[words] / count["words"] if count["words"] >= _LEAST_WORDS else 0.0

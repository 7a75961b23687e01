"""The stage script, which drops text in another script than its language's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from m4.data.arrays import U8, Mask
from m4.data.cleaning import AnyCheck, CleaningStage, Findings, Opened, Share
from m4.data.cleaning.chunk import Chunk, code_points
from m4.data.directions import SIDES, split_direction
from m4.data.scripts import NUMBERS, WEIGHTS, likely_scripts_of, script_numbers, scripts_of
from m4.settings import checked

# Maximum number of words of a name, a side without any letter of its language's script.
_NAME_WORDS = 3


@checked
@dataclass(frozen=True)
class Script(CleaningStage):
    """Drops a pair with a side in another script than its language's.

    Only letters of a script count: digits, punctuation, emoji and accents have none. A letter is
    weighed by what it carries: a Chinese character counts as 3 Latin letters. The share of Latin
    letters may be up to `most_latin`, because every text has names and abbreviations, that of other
    scripts' letters up to `most_other`. A side without any letter is in no wrong script.

    Words that the pair's other side has too do not count: they are names ("Скачать Firefox ESR").
    But where a side has no letter of its language's script, more than three such words are a
    sentence that was not translated.

    For a language that is not in m4's table, and for a code with a territory ('pt_BR'), the likely
    script counts, if most of its text is written so. Unknown languages are not checked.

    Attributes:
        most_latin: Largest share of Latin letters.
        most_other: Largest share of letters of other scripts.
    """

    name: ClassVar[str] = "script"
    most_latin: Share = 0.5
    most_other: Share = 0.2

    def identity(self) -> dict[str, Any]:
        return {**asdict(self), "names": "shared words"}

    def open(self, language_pairs: Sequence[str]) -> Opened:
        def check(pair: str, split: str) -> AnyCheck | str:
            languages = dict(zip(SIDES, split_direction(pair), strict=True))
            known = {side: scripts_of(language) for side, language in languages.items()}
            likely = [side for side in SIDES if known[side] is None]
            known |= {side: likely_scripts_of(languages[side]) for side in likely}
            scripts = {side: one for side, one in known.items() if one}
            if len(scripts) < len(SIDES):
                return "nothing is known of the language's script"
            if likely:
                return _Likely(self, scripts, likely)
            return lambda chunk: self._look(chunk, scripts)

        return check

    def _look(self, chunk: Chunk, scripts: Mapping[str, frozenset[str]]) -> Findings:
        return Findings({f"{s} side": self.wrong(chunk, s, of) for s, of in scripts.items()})

    def wrong(self, chunk: Chunk, side: str, scripts: frozenset[str]) -> Mask:
        """Returns [n]: whether too much of each sentence is in none of `scripts`."""
        strange = WEIGHTS > 0
        strange[[NUMBERS[script] for script in scripts]] = False
        numbers = script_numbers(chunk.code_points(side))
        places = np.flatnonzero(strange[numbers])
        if not len(places):
            return np.zeros(len(chunk), bool)
        # Foreign letters are rare: a side's letters are counted only if it has one.
        ends = np.cumsum(chunk.lengths(side))
        rows = np.searchsorted(ends, places, side="right")
        latin = numbers[places] == NUMBERS["Latn"]
        weights = WEIGHTS[numbers]
        in_latin, in_other = (
            np.bincount(rows[of], weights[places[of]], minlength=len(chunk))
            for of in (latin, ~latin)
        )
        sums = np.concatenate([[0], np.cumsum(weights)])
        wrong = self._too_much(in_latin, in_other, np.diff(sums[ends], prepend=0))
        others = chunk.side("first" if side == "second" else "second")
        for row in np.flatnonzero(wrong).tolist():
            text = chunk.side(side)[row]
            mine = numbers[ends[row] - len(text) : ends[row]]
            wrong[row] = self._is_wrong(text, mine, strange, others[row])
        return wrong

    def _too_much(self, latin: Any, other: Any, letters: Any) -> Any:
        """Compares weights of letters (or arrays) with the bounds."""
        too_latin = (latin > self.most_latin * letters) & (latin > 0)
        return too_latin | ((other > self.most_other * letters) & (other > 0))

    def _is_wrong(self, text: str, numbers: U8, strange: Mask, other: str) -> bool:
        """Judges one sentence, ignoring words that the other side also has."""
        theirs = {word for word, _ in _words(other, strange[script_numbers(code_points(other))])}
        counted = np.ones(len(numbers), bool)
        for word, place in _words(text, strange[numbers]):
            counted[place] = word not in theirs
        weights = WEIGHTS[numbers] * counted
        if not weights.any():
            return len(text.split()) > _NAME_WORDS
        in_latin = weights[strange[numbers] & (numbers == NUMBERS["Latn"])].sum()
        in_other = weights[strange[numbers] & (numbers != NUMBERS["Latn"])].sum()
        return bool(self._too_much(in_latin, in_other, weights.sum()))


def _words(text: str, of: Mask) -> list[tuple[str, slice]]:
    """Returns the casefolded runs of characters that a mask [characters] selects."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], of, [False]]).astype(np.int8)))
    runs = [slice(start, end) for start, end in edges.reshape(-1, 2).tolist()]
    return [(text[run].casefold(), run) for run in runs]


class _Likely(NamedTuple):
    """The check for a script that is only likely; `fit` finds whether the text uses it."""

    settings: Script
    scripts: Mapping[str, frozenset[str]]
    sides: Sequence[str]

    def measure(self, chunk: Chunk) -> Counter[str]:
        wrong = {s: int(self.settings.wrong(chunk, s, self.scripts[s]).sum()) for s in self.sides}
        return Counter({"pairs": len(chunk), **wrong})

    def fit(self, counts: Counter[str]) -> bool:
        return all(2 * counts[side] < counts["pairs"] for side in self.sides)

    def judge(self, chunk: Chunk, fitted: bool) -> Findings:
        if fitted:
            return self.settings._look(chunk, self.scripts)
        why = "most of the text is not in the language's likely script"
        return Findings(not_checked={why: np.ones(len(chunk), bool)})

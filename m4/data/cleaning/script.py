"""Wrong script: text that is not written in the letters of its language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.cleaning import Check, Findings, NotChecked, Opened, Share
from m4.data.cleaning.chunk import Chunk
from m4.data.scripts import COMMON, NUMBERS, SCRIPTS, likely_scripts_of, script_numbers, scripts_of
from m4.settings import SettingError, checked

# A Chinese character says about as much as three Latin letters: "Allen是个诗人" is Chinese.
_LATIN_IN_HAN = 1 / 3


@checked
@dataclass(frozen=True)
class Script:
    """Drops a pair with a side in another script than its language's.

    Counted are characters of a script: digits, punctuation, emoji and accents have none. Latin
    letters may be up to `most_latin` of them, as every text has names and abbreviations; letters
    of other scripts up to `most_other`. A side without any letter is in no wrong script.
    Next to Chinese characters a Latin letter counts a third.

    scripts: language -> ISO 15924 scripts, where a corpus is written in others than
    `m4.data.scripts.scripts_of` says. Of a language that is not in m4's table, and of a code with a
    territory ('pt_BR'), the likely script counts, if most of its text is written so. A language of
    which nothing is known is not checked.
    """

    most_latin: Share = 0.5
    most_other: Share = 0.2
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for code, scripts in self.scripts.items():
            if not scripts or set(scripts) - set(SCRIPTS):
                raise SettingError(
                    f"Script.scripts[{code!r}]",
                    scripts,
                    "a list of ISO 15924 codes of Unicode's scripts, e.g. ['Latn']",
                )

    @property
    def name(self) -> str:
        return "script"

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, languages: Sequence[str]) -> Opened:
        english = self._scripts_of("en")
        assert english is not None

        def check(language: str, split: str) -> Check | NotChecked:
            if (foreign := self._scripts_of(language)) is not None:
                return lambda chunk: self._look(chunk, english, foreign)
            if (likely := likely_scripts_of(language)) is not None:
                return _Likely(self, english, likely)
            return NotChecked("nothing is known of the language's script")

        return check

    def _look(self, chunk: Chunk, english: frozenset[str], foreign: frozenset[str]) -> Findings:
        sides = (("english", english), ("foreign", foreign))
        return Findings(
            {f"{side} side": self.wrong(chunk, side, scripts) for side, scripts in sides}
        )

    def _scripts_of(self, language: str) -> frozenset[str] | None:
        given = self.scripts.get(language)
        return scripts_of(language) if given is None else frozenset(given)

    def wrong(self, chunk: Chunk, side: str, scripts: frozenset[str]) -> npt.NDArray[np.bool_]:
        """[n]: whether too much of each sentence is written in none of `scripts`."""
        own, common, latin = (np.zeros(len(SCRIPTS), bool) for _ in range(3))
        own[[NUMBERS[script] for script in scripts]] = True
        common[[NUMBERS[script] for script in COMMON]] = True
        latin[NUMBERS["Latn"]] = "Latn" not in scripts
        numbers = script_numbers(chunk.code_points(side))
        # Strange letters are few; the letters of a side are counted where there is one.
        strange = np.flatnonzero((~common & ~own)[numbers])
        wrong = np.zeros(len(chunk), bool)
        if len(strange):
            ends = np.cumsum(chunk.lengths(side))
            rows = np.searchsorted(ends, strange, side="right")
            is_latin = latin[numbers[strange]]
            in_latin = np.bincount(rows[is_latin], minlength=len(chunk))
            in_other = np.bincount(rows[~is_latin], minlength=len(chunk))
            sums = np.concatenate([[0], np.cumsum((~common)[numbers])])
            letters = np.diff(sums[ends], prepend=0)
            if "Hani" in scripts:
                letters = letters - in_latin + in_latin * _LATIN_IN_HAN
                in_latin = in_latin * _LATIN_IN_HAN
            wrong |= (in_latin > self.most_latin * letters) & (in_latin > 0)
            wrong |= (in_other > self.most_other * letters) & (in_other > 0)
        return wrong


class _Likely:
    """The check of a language whose script is only likely: `fit` finds whether its text has it."""

    def __init__(self, settings: Script, english: frozenset[str], foreign: frozenset[str]) -> None:
        self._settings, self._english, self._foreign = settings, english, foreign
        self._is_so = False

    def fit(self, chunks: Iterator[Chunk]) -> None:
        wrong = pairs = 0
        for chunk in chunks:
            wrong += int(self._settings.wrong(chunk, "foreign", self._foreign).sum())
            pairs += len(chunk)
        self._is_so = 2 * wrong < pairs

    def __call__(self, chunk: Chunk) -> Findings:
        if self._is_so:
            return self._settings._look(chunk, self._english, self._foreign)
        why = "most of the text is not in the language's likely script"
        return Findings(not_checked={why: np.ones(len(chunk), bool)})

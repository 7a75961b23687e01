"""Wrong script: text that is not written in the letters of its language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data.cleaning import Check, Findings, NotChecked, Opened, check_number
from m4.data.cleaning.chunk import Chunk
from m4.data.scripts import COMMON, NUMBERS, SCRIPTS, script_numbers, scripts_of


@dataclass(frozen=True)
class Script:
    """Drops a pair with a side in another script than its language's.

    Counted are characters of a script: digits, punctuation, emoji and accents have none. Latin
    letters may be up to `most_latin` of them, as names and abbreviations stand in every text; other
    foreign letters up to `most_other`. A side without any letter is in no wrong script.

    scripts: language -> ISO 15924 scripts, where a corpus is written in others than
    `m4.data.scripts.scripts_of` says. A language of which nothing is known is not checked.
    """

    most_latin: float = 0.5
    most_other: float = 0.2
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number(self.most_latin, 0, "script.Script.most_latin", 1)
        check_number(self.most_other, 0, "script.Script.most_other", 1)
        for code, scripts in self.scripts.items():
            if isinstance(scripts, str) or not scripts or set(scripts) - set(SCRIPTS):
                raise ValueError(
                    f"scripts of {code!r} are {scripts!r}: must be a list of ISO 15924 codes of "
                    "Unicode's scripts, e.g. ['Latn'] (script.Script.scripts)"
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
            foreign = self._scripts_of(language)
            if foreign is None:
                return NotChecked("nothing is known of the language's script")

            def look(chunk: Chunk) -> Findings:
                return Findings(
                    {
                        f"{side} side": self.wrong(chunk, side, scripts)
                        for side, scripts in (("english", english), ("foreign", foreign))
                    }
                )

            return look

        return check

    def _scripts_of(self, language: str) -> frozenset[str] | None:
        given = self.scripts.get(language)
        return scripts_of(language) if given is None else frozenset(given)

    def wrong(self, chunk: Chunk, side: str, scripts: frozenset[str]) -> npt.NDArray[np.bool_]:
        """[n]: whether too much of each sentence is written in none of `scripts`."""
        numbers = script_numbers(chunk.code_points(side))
        ends = np.cumsum(chunk.lengths(side))

        def count(wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
            sums = np.concatenate([[0], np.cumsum(wanted[numbers])])[ends]
            return np.diff(sums, prepend=0)

        own, common, latin = (np.zeros(len(SCRIPTS), bool) for _ in range(3))
        own[[NUMBERS[script] for script in scripts]] = True
        common[[NUMBERS[script] for script in COMMON]] = True
        latin[NUMBERS["Latn"]] = "Latn" not in scripts
        letters = count(~common)
        return (count(latin) > self.most_latin * letters) | (
            count(~common & ~own & ~latin) > self.most_other * letters
        )

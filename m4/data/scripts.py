"""Which Unicode scripts a language is written in, and which one a character belongs to."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from fontTools.unicodedata import Scripts

from m4.data.cldr.likely import likely_script
from m4.data.languages import describe

# ISO 15924's names for several scripts together, and what else texts in a script are written with.
_TOGETHER = {
    "Jpan": ("Hani", "Hira", "Kana"),
    "Hrkt": ("Hira", "Kana"),
    "Kore": ("Hang", "Hani"),
    "Hang": ("Hang", "Hani"),
    "Hans": ("Hani", "Bopo"),
    "Hant": ("Hani", "Bopo"),
    "Hanb": ("Hani", "Bopo"),
    "Aran": ("Arab",),
    "Cyrs": ("Cyrl",),
    "Latf": ("Latn",),
    "Latg": ("Latn",),
    "Syre": ("Syrc",),
    "Syrj": ("Syrc",),
    "Syrn": ("Syrc",),
}
# Characters of every script (digits, punctuation, emoji) and marks that go with any letter.
COMMON = ("Zyyy", "Zinh")
# The numbers of the scripts in `script_numbers`: their order here.
SCRIPTS = tuple(dict.fromkeys([*COMMON, *Scripts.VALUES]))
NUMBERS = {script: number for number, script in enumerate(SCRIPTS)}


def scripts_of(code: str) -> frozenset[str] | None:
    """The ISO 15924 scripts of a language's letters: 'ja' -> Hani, Hira, Kana; 'srp_Latn' -> Latn.
    None: nothing is known of the code, which is m4's or ISO 639's with or without a script.

    The code's own script counts before m4's table of languages.
    """
    own = re.fullmatch(r"[A-Za-z]+_([A-Z][a-z]{3})(?:_.*)?", code)
    return _letters_of(own[1] if own else "Latn" if code == "en" else describe(code).script)


def likely_scripts_of(code: str) -> frozenset[str] | None:
    """The same of a language of which CLDR gives the likely script, which need not be a text's:
    Ladino is written in Hebrew letters and in Latin ones."""
    return _letters_of(likely_script(code) or "")


def _letters_of(script: str) -> frozenset[str] | None:
    scripts = _TOGETHER.get(script, (script,))
    return frozenset(scripts) if scripts[0] in NUMBERS else None


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint8]:
    """[0x110000]: the number of each character's script."""
    assert len(SCRIPTS) <= 256
    ends = [*Scripts.RANGES[1:], 0x110000]
    sizes = np.array(ends) - np.array(Scripts.RANGES)
    numbers = np.array([NUMBERS[script] for script in Scripts.VALUES], np.uint8)
    return np.repeat(numbers, sizes)


def script_numbers(code_points: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """[n] characters -> [n] their scripts, as places in SCRIPTS."""
    return _table()[code_points]

"""Scripts of languages and of characters, by Unicode."""

from functools import lru_cache

import numpy as np
from fontTools.unicodedata import Scripts

from m4.data.arrays import U8, U32
from m4.data.directions import base_language
from m4.data.languages import describe, listed, split_code

# ISO 15924's names for combined scripts, and other scripts that texts in a script also use.
_TOGETHER = {
    "Jpan": ("Hani", "Hira", "Kana"), "Hrkt": ("Hira", "Kana"), "Kore": ("Hang", "Hani"),
    "Hang": ("Hang", "Hani"), "Hans": ("Hani", "Bopo"), "Hant": ("Hani", "Bopo"),
    "Hanb": ("Hani", "Bopo"), "Aran": ("Arab",), "Cyrs": ("Cyrl",), "Latf": ("Latn",),
    "Latg": ("Latn",), "Syre": ("Syrc",), "Syrj": ("Syrc",), "Syrn": ("Syrc",),
}  # fmt: skip
# Characters of all scripts (digits, punctuation, emoji) and marks on any letter.
COMMON = ("Zyyy", "Zinh")
# Scripts, in the order of their numbers in `script_numbers`.
SCRIPTS = tuple(dict.fromkeys([*COMMON, *Scripts.VALUES]))
NUMBERS = {script: number for number, script in enumerate(SCRIPTS)}
# Weight of a letter in tenths of a Latin one, by the English letters that it replaces in pairs of
# Tatoeba ("Allen是个诗人" is Chinese). Integers make sums exact.
_CARRIES = {"Hani": 30, "Hang": 20, "Hira": 15, "Kana": 15, "Ethi": 15, "Hebr": 13, "Arab": 12}
WEIGHTS = np.array([0 if one in COMMON else _CARRIES.get(one, 10) for one in SCRIPTS])


def scripts_of(code: str) -> frozenset[str] | None:
    """Returns the scripts of a language's letters, 'ja' -> Hani, Hira, Kana, or None if unknown.

    The code is m4's or ISO 639's; a script in it overrides m4's table of languages.
    """
    code = base_language(code)
    _, own = split_code(code)
    known = describe(code) if code == "en" else listed(code)
    return _letters_of(own or (known.script if known else ""))


def likely_scripts_of(code: str) -> frozenset[str] | None:
    """Returns the scripts of a code for which only the likely script is known.

    Ladino, for instance, is written in Hebrew and in Latin letters. A code with a territory or a
    user's addition ('zh_TW', 'pt_BR_2') does not name a script: CLDR may know that of the territory
    ('pa_PK' is Arab, 'pa' Guru); otherwise it is the language's.
    """
    parts = base_language(code).split("_")
    for end in range(len(parts), 0, -1):
        if script := describe("_".join(parts[:end])).script:
            return _letters_of(script)
    return None


def _letters_of(script: str) -> frozenset[str] | None:
    scripts = _TOGETHER.get(script, (script,))
    return frozenset(scripts) if scripts[0] in NUMBERS else None


@lru_cache(maxsize=1)
def _table() -> U8:
    """Returns [0x110000] script numbers of characters."""
    assert len(SCRIPTS) <= 256
    ends = [*Scripts.RANGES[1:], 0x110000]
    sizes = np.array(ends) - np.array(Scripts.RANGES)
    numbers = np.array([NUMBERS[script] for script in Scripts.VALUES], np.uint8)
    return np.repeat(numbers, sizes)


def script_numbers(code_points: U32) -> U8:
    """Returns [n] scripts of [n] characters, as indices of SCRIPTS."""
    return _table()[code_points]

"""Scripts of languages, and of characters, after Unicode."""

from functools import lru_cache

import numpy as np
from fontTools.unicodedata import Scripts

from m4.data.arrays import U8, U32
from m4.data.directions import base_language
from m4.data.languages import describe, listed, split_code

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
# What a letter weighs, in tenths of a Latin one: the English letters that it stands for in pairs of
# Tatoeba ("Allen是个诗人" is Chinese). Whole numbers, so that sums are exact.
_CARRIES = {"Hani": 30, "Hang": 20, "Hira": 15, "Kana": 15, "Ethi": 15, "Hebr": 13, "Arab": 12}
WEIGHTS = np.array([0 if one in COMMON else _CARRIES.get(one, 10) for one in SCRIPTS])


def scripts_of(code: str) -> frozenset[str] | None:
    """Returns the scripts of a language's letters: 'ja' -> Hani, Hira, Kana; None: not known.

    The code is m4's or ISO 639's; its own script counts before m4's table of languages.
    """
    code = base_language(code)
    _, own = split_code(code)
    known = describe(code) if code == "en" else listed(code)
    return _letters_of(own or (known.script if known else ""))


def likely_scripts_of(code: str) -> frozenset[str] | None:
    """Returns the scripts of a code of which only the likely one is known.

    Ladino is written in Hebrew letters and in Latin ones. And in a code with a territory or a
    user's own addition ('zh_TW', 'pt_BR_2') nothing says the script: CLDR may know one of the
    territory ('pa_PK' is Arab, 'pa' Guru), or else it is the language's.
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
    """Returns [0x110000] numbers of the characters' scripts."""
    assert len(SCRIPTS) <= 256
    ends = [*Scripts.RANGES[1:], 0x110000]
    sizes = np.array(ends) - np.array(Scripts.RANGES)
    numbers = np.array([NUMBERS[script] for script in Scripts.VALUES], np.uint8)
    return np.repeat(numbers, sizes)


def script_numbers(code_points: U32) -> U8:
    """Returns [n] scripts of [n] characters, as places in SCRIPTS."""
    return _table()[code_points]

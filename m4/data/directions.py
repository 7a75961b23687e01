"""Directions of translation ("en-gl"), and mixtures, which name those of a corpus.

A code may say where text comes from: "gl~lexicon" is more Galician, which samplers draw apart, for
training alone. "gl~bt" is Galician that a model wrote: only a source, with a mark in front of it.
"""

import re
from collections.abc import Sequence
from typing import Annotated

from m4.settings import OneOf

# The sentences of a pair.
SIDES: tuple[str, ...] = ("english", "translation")
# Their names in the files of a corpus. They also seed sampled segmentations, so that other names
# would give other ids.
STORED = {"english": "english", "translation": "foreign"}
# Mixture -> the sides that are sources, and those that are targets.
SIDES_OF = {
    "to_english": {"source": ("translation",), "target": ("english",)},
    "from_english": {"source": ("english",), "target": ("translation",)},
    "english_centric": {"source": SIDES, "target": SIDES},
}
MIXTURES = tuple(SIDES_OF)
Mixture = Annotated[str, OneOf(MIXTURES)]


def is_code(code: str) -> bool:
    """Returns whether m4 can use a language's code, which is part of names of files and of tags."""
    return re.fullmatch(r"[A-Za-z0-9_]+(~[a-z0-9]+)?", code) is not None


def base_language(code: str) -> str:
    """Returns the language of a code, without where its text comes from: 'gl~bt' -> 'gl'."""
    return code.partition("~")[0]


def is_synthetic(code: str) -> bool:
    """Returns whether a model wrote the text of a code (back-translation)."""
    return code.endswith("~bt")


def directions_of(mixture: str, languages: Sequence[str]) -> list[str]:
    """Returns the directions of a mixture: 'english_centric', ['gl'] -> ['en-gl', 'gl-en']."""
    from_english = [f"en-{code}" for code in languages if not is_synthetic(code)]
    to_english = [f"{code}-en" for code in languages]
    return {
        "from_english": from_english,
        "to_english": to_english,
        "english_centric": from_english + to_english,
    }[mixture]

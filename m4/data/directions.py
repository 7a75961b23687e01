"""Directions of translation ("en-gl"), and mixtures, which name those of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from m4.settings import OneOf

# The sentences of a pair; the name of the second is part of the cache's file names.
SIDES: tuple[str, ...] = ("english", "translation")
# What files and fingerprints of a corpus call them, as ever: with other names each corpus would
# have to be built again, and no run that was trained on one would resume.
STORED = {"english": "english", "translation": "foreign"}
# Mixture -> the sides that are sources, and those that are targets.
SIDES_OF = {
    "to_english": {"source": ("translation",), "target": ("english",)},
    "from_english": {"source": ("english",), "target": ("translation",)},
    "english_centric": {"source": SIDES, "target": SIDES},
}
MIXTURES = tuple(SIDES_OF)
Mixture = Annotated[str, OneOf(MIXTURES)]
# The name that english_centric had in caches of earlier versions.
_OLD = {"any_to_any": "english_centric"}


def mixture_of(name: str | None) -> str | None:
    """A mixture's name as it is now."""
    return name if name is None else _OLD.get(name, name)


def directions_of(mixture: str, languages: Sequence[str]) -> list[str]:
    """Returns the directions of a mixture: 'english_centric', ['gl'] -> ['en-gl', 'gl-en']."""
    from_english, to_english = [f"en-{c}" for c in languages], [f"{c}-en" for c in languages]
    return {
        "from_english": from_english,
        "to_english": to_english,
        "english_centric": from_english + to_english,
    }[mixture]

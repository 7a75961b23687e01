"""Decides on a drawn pair: its split, its use, and the names that are held out of it."""

from __future__ import annotations

import re

from m4.data.cldr.specs import Atom
from m4.data.splits import text_hash

MOST_CHARACTERS = 120
TEST_PERMILLE, DEV_PERMILLE = 20, 10
HELD_ONE_IN = 16
_WORDS = re.compile(r"[^\W\d_]{2,}")  # letters only, two or more: digits and "e" are no words


def split_of(english: str) -> str:
    """Returns 'train', 'dev' or 'test' by the English text: the same in every language."""
    value = text_hash(english) % 1000
    if value < TEST_PERMILLE:
        return "test"
    return "dev" if value < TEST_PERMILLE + DEV_PERMILLE else "train"


def held(language: str, atom: Atom) -> bool:
    """Returns whether `atom` is kept out of this language's training pairs (about 6 % are).

    Other languages still see it, so that a right translation of it is transfer.
    """
    return text_hash(f"{language} {atom[0]} {atom[1]}") % HELD_ONE_IN == 0


def accept(english: str, translation: str) -> bool:
    """Returns whether there is something to translate: no copy, with letters, not too long.

    A copy is an equal text, or one half or more of whose different words stand in the English.
    Letters that make no word ("2.5 m", "5月18日") pass.
    """
    if len(english) > MOST_CHARACTERS or len(translation) > MOST_CHARACTERS:
        return False
    source, target = english.casefold(), translation.casefold()
    if source == target:
        return False
    words = set(_WORDS.findall(target))
    if not words:
        return any(character.isalpha() for character in target)
    return 2 * len(words.intersection(_WORDS.findall(source))) < len(words)

"""Language pairs ("en-gl"), directions of translation, and mixtures, which choose directions.

A pair has two directions; "gl-en" is the one opposite to its name. Names have English first, and
other languages sorted by code: "en-gl", "fr-wo".

A code may say where text comes from: "gl~lexicon" is additional Galician, only for training, which
samplers draw separately. "gl~bt" is Galician that a model wrote, and "en~bt" such English: they are
only sources, with a mark in front.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Annotated

from m4.settings import InputError, OneOf

# Sides of a pair, in the order of its languages.
SIDES: tuple[str, ...] = ("first", "second")
ROLES: tuple[str, ...] = ("source", "target")
_CHOSEN = {
    "to_english": lambda source, target: target == "en",
    "from_english": lambda source, target: source == "en",
    "english_centric": lambda source, target: "en" in (source, target),
    "direct": lambda source, target: True,
    "any_to_any": lambda source, target: True,  # also has `pivoted` pairs
}
MIXTURES = tuple(_CHOSEN)
# Kinds of directions, which are averaged separately.
TO_ENGLISH, FROM_ENGLISH, WITHOUT_ENGLISH = "xx->en", "en->xx", "xx->yy"
# Name of a mixture, or its directions.
Mixture = Annotated[str, OneOf(MIXTURES)] | Sequence[str]


def is_code(code: str) -> bool:
    """Returns whether m4 can use a language code, which is part of file names and tags."""
    return re.fullmatch(r"[A-Za-z0-9_]+(~[a-z0-9]+)?", code) is not None


def base_language(code: str) -> str:
    """Returns the language of a code, without the origin of its text: 'gl~bt' -> 'gl'."""
    return code.partition("~")[0]


def is_synthetic(code: str) -> bool:
    """Returns whether a model wrote the text of a code (back-translation)."""
    return code.endswith("~bt")


def base_pair(pair: str) -> str:
    """Returns a pair without the origin of its text: 'en-gl~bt' -> 'en-gl'."""
    return pair_of("-".join(map(base_language, split_direction(pair))))


def is_held_out(pair: str) -> bool:
    """Returns whether a pair has dev and test text, which additional text lacks."""
    return "~" not in pair


def split_direction(direction: str) -> tuple[str, str]:
    """Splits a direction or a pair: 'en-gl' -> ('en', 'gl')."""
    first, _, second = direction.partition("-")
    if not (is_code(first) and is_code(second)) or first == second:
        raise InputError(
            f"direction {direction!r}: must be two languages as 'en-xx', with '-' between the codes"
        )
    return first, second


def pair_of(name: str) -> str:
    """Returns the pair of a direction, or of a language with English: 'gl-en', 'gl' -> 'en-gl'."""
    codes = split_direction(name if "-" in name else f"en-{name}")
    return "-".join(sorted(codes, key=lambda code: (code != "en", code)))


def in_order(pair: str) -> tuple[bool, str]:
    """Returns a sort key for pairs that puts those with English first."""
    return not pair.startswith("en-"), pair


def key_of(pair: str) -> str:
    """Returns the short name of a pair: 'gl' for 'en-gl', 'fr-wo' for 'fr-wo'.

    It is part of file names and seeds, which decide ids and batches, so it never changes.
    """
    return pair.removeprefix("en-")


def reverse(direction: str) -> str:
    """Returns the other direction of its pair: 'en-gl' -> 'gl-en'."""
    return "-".join(split_direction(direction)[::-1])


def sides_of(direction: str) -> tuple[str, ...]:
    """Returns the pair's sides that are source and target: ('second', 'first') for 'gl-en'."""
    return SIDES if pair_of(direction) == direction else SIDES[::-1]


def side_of(direction: str) -> str:
    """Returns 'xx->en' for 'gl-en', 'en->xx' for 'en-gl' and 'xx->yy' for 'gl-fr'."""
    source, target = split_direction(direction)
    if "en" not in (source, target):
        return WITHOUT_ENGLISH
    return TO_ENGLISH if target == "en" else FROM_ENGLISH


def label_of(direction: str) -> str:
    """Returns the language next to English, 'gl' for 'gl-en', otherwise the direction, 'wo-fr'."""
    return direction if side_of(direction) == WITHOUT_ENGLISH else key_of(pair_of(direction))


def languages_of(pairs: Iterable[str]) -> list[str]:
    """Returns the distinct languages of pairs or directions, in order."""
    return list(dict.fromkeys(code for pair in pairs for code in split_direction(pair)))


def directions_of(mixture: Mixture, pairs: Sequence[str]) -> list[str]:
    """Returns a mixture's directions of these pairs: 'direct', ['en-gl'] -> ['en-gl', 'gl-en']."""
    if not isinstance(mixture, str):
        return [direction for direction in mixture if pair_of(direction) in pairs]
    both = ((one, *split_direction(one)) for one in [*pairs, *map(reverse, pairs)])
    return [
        direction
        for direction, source, target in both
        if _CHOSEN[mixture](base_language(source), base_language(target))
        and not is_synthetic(target)
    ]


def zero_shot_directions(directions: Sequence[str]) -> list[str]:
    """Returns the other directions between the languages of these directions."""
    pairs = [split_direction(name) for name in directions if is_held_out(name)]
    sources, targets = (dict.fromkeys(side) for side in zip(*pairs, strict=True))
    return [f"{source}-{target}" for source in sources for target in targets
            if source != target and f"{source}-{target}" not in directions]  # fmt: skip


def pivoted(pairs: Sequence[str]) -> list[str]:
    """Returns the pairs of languages that share a third one: en-fr, en-wo -> fr-wo.

    Pairs with their own text and codes with an origin are left out.
    """
    others: dict[str, list[str]] = {}
    for pair in filter(is_held_out, pairs):
        first, second = split_direction(pair)
        others.setdefault(first, []).append(second)
        others.setdefault(second, []).append(first)
    found = {pair_of("-".join(two)) for of in others.values() for two in combinations(of, 2)}
    return sorted(found - {*pairs}, key=in_order)


def sides_with(role: str, directions: Iterable[str]) -> list[str]:
    """Returns the sides that have the role, source or target, in any of the directions."""
    used = {sides_of(direction)[ROLES.index(role)] for direction in directions}
    return [side for side in SIDES if side in used]

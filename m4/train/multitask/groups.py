"""Groups of directions: whose gradients are compared, or altered for each other's sake."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from m4.data.languages import describe
from m4.data.preprocess import language_of, split_direction
from m4.data.samplers import matching
from m4.settings import SettingError, checked, configurable

Groups = dict[str, list[str]]
_LEVELS = ("high", "medium", "low")


@dataclasses.dataclass(frozen=True)
class Directions:
    """What is known of the directions of a training.

    Attributes:
        names: in the order of a batch's direction_ids. sizes: their training pairs.
        levels: resource level -> its directions.
    """

    names: Sequence[str]
    sizes: Mapping[str, int]
    levels: Mapping[str, Sequence[str]]

    @classmethod
    def assumed(cls, names: Sequence[str]) -> Directions:
        """Without a corpus: all of one size, the languages over the three levels one by one."""
        languages = list(dict.fromkeys(map(language_of, names)))
        levels: Groups = {level: [] for level in _LEVELS}
        for name in names:
            levels[_LEVELS[languages.index(language_of(name)) % len(_LEVELS)]].append(name)
        return cls(names, dict.fromkeys(names, 1), levels)

    def named(self, name: str, setting: str) -> list[str]:
        """The directions that a direction, a language or a resource level means.

        Raises:
            SettingError: it is none of them here.
        """
        if name in self.levels:
            return list(self.levels[name])
        return matching([name], self.names, setting)


class Grouping(Protocol):
    """Directions -> named groups of them; every direction is in one, and none is in two."""

    def __call__(self, directions: Directions) -> Groups: ...


def _gathered(directions: Directions, names: Sequence[str]) -> Groups:
    found: Groups = {}
    for direction, name in zip(directions.names, names, strict=True):
        found.setdefault(name, []).append(direction)
    return found


@configurable
def by_level(directions: Directions) -> Groups:
    """Resource levels: high, medium, low; those that have languages."""
    return {name: list(members) for name, members in directions.levels.items() if members}


@configurable
def by_family(directions: Directions) -> Groups:
    """Branches of language families, as `m4.data.languages` names them; a language that m4 does
    not know is a separate group."""
    languages = [language_of(direction) for direction in directions.names]
    return _gathered(directions, [describe(code).branch or code for code in languages])


@configurable
def by_side(directions: Directions) -> Groups:
    """From English and to English."""
    from_english = [split_direction(name)[0] == "en" for name in directions.names]
    return _gathered(directions, ["en->xx" if out else "xx->en" for out in from_english])


@configurable
def by_language(directions: Directions) -> Groups:
    """Each language, with both of its directions."""
    return _gathered(directions, [language_of(name) for name in directions.names])


@checked
@dataclasses.dataclass(frozen=True)
class Listed:
    """Groups by list; what no list names is the group "others".

    Attributes:
        groups: name -> directions, languages or resource levels.
    """

    groups: Mapping[str, Sequence[str]]

    def __call__(self, directions: Directions) -> Groups:
        found: Groups = {}
        for name, members in self.groups.items():
            there = [d for one in members for d in directions.named(one, "Listed.groups")]
            if twice := [d for d in there if any(d in other for other in found.values())]:
                raise SettingError("Listed.groups", twice[0], f"in one group, not in {name!r} too")
            if there:
                found[name] = list(dict.fromkeys(there))
        named = {d for members in found.values() for d in members}
        others = [d for d in directions.names if d not in named]
        return {**found, "others": others} if others else found

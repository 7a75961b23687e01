"""Sets of directions whose gradients are compared or altered, and factors by direction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from m4.data.directions import key_of, label_of, pair_of, side_of, split_direction
from m4.data.languages import describe
from m4.data.samplers import matching
from m4.settings import Factor, SettingError, check_value, checked, configurable

Groups = dict[str, list[str]]
# Factors by name, {"en-gl": 2.0}, or a function of the directions' sizes like a sampler.
Factors = Mapping[str, Factor] | Callable[[dict[str, int]], Mapping[str, float]]
_LEVELS = ("high", "medium", "low")


@dataclasses.dataclass(frozen=True)
class Directions:
    """Directions of a training, with their sizes and resource levels."""

    names: Sequence[str]  # directions in the order of a batch's direction_ids
    sizes: Mapping[str, int]
    levels: Mapping[str, Sequence[str]]

    @classmethod
    def assumed(cls, names: Sequence[str]) -> Directions:
        """Assumes equal sizes, and levels in turn by pair, for use without a corpus."""
        pairs = list(dict.fromkeys(map(pair_of, names)))
        levels: Groups = {level: [] for level in _LEVELS}
        for name in names:
            levels[_LEVELS[pairs.index(pair_of(name)) % len(_LEVELS)]].append(name)
        return cls(names, dict.fromkeys(names, 1), levels)

    def named(self, name: str, setting: str) -> list[str]:
        """Returns the directions that the name of a direction, language or resource level means."""
        if name in self.levels:
            return list(self.levels[name])
        return matching([name], self.names, setting)


class Grouping(Protocol):
    """Function that returns named sets of directions; every direction is in exactly one."""

    def __call__(self, directions: Directions) -> Groups: ...


def _gathered(directions: Directions, names: Sequence[str]) -> Groups:
    found: Groups = {}
    for direction, name in zip(directions.names, names, strict=True):
        found.setdefault(name, []).append(direction)
    return found


@configurable
def by_level(directions: Directions) -> Groups:
    """Divides directions by resource level: high, medium, low."""
    return {name: list(members) for name, members in directions.levels.items() if members}


@configurable
def by_family(directions: Directions) -> Groups:
    """Divides directions by branch of the language families in `m4.data.languages`.

    An unknown language is a set of its own. The language is the one next to English or, without
    English, the target.
    """
    languages = [label_of(direction).rpartition("-")[2] for direction in directions.names]
    return _gathered(directions, [describe(code).branch or code for code in languages])


@configurable
def by_side(directions: Directions) -> Groups:
    """Divides directions into those from English, to English and without English."""
    return _gathered(directions, [*map(side_of, directions.names)])


@configurable
def by_source(directions: Directions) -> Groups:
    """Divides directions by source language."""
    return _gathered(directions, [split_direction(name)[0] for name in directions.names])


@configurable
def by_target(directions: Directions) -> Groups:
    """Divides directions by target language."""
    return _gathered(directions, [split_direction(name)[1] for name in directions.names])


@configurable
def by_language(directions: Directions) -> Groups:
    """Puts both directions of a pair into one set, named by the language next to English."""
    return _gathered(directions, [key_of(pair_of(name)) for name in directions.names])


@checked
@dataclasses.dataclass(frozen=True)
class Listed:
    """Listed sets of directions; all other directions form the set "others".

    Attributes:
        groups: Name of a set -> its directions, languages or resource levels.
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


def check_groups(grouping: Grouping, directions: Directions, setting: str) -> Groups:
    """Returns at least two sets with each direction in exactly one. Raises SettingError."""
    groups = {name: list(members) for name, members in grouping(directions).items() if members}
    listed = [d for members in groups.values() for d in members]
    if sorted(listed) != sorted(directions.names):
        wrong = [d for d in directions.names if listed.count(d) != 1]
        raise SettingError(setting, grouping, f"such that {wrong[0]} is in one group")
    if len(groups) < 2:
        only = next(iter(groups))
        allowed = f"such that there are two groups or more; all directions are {only!r}"
        raise SettingError(setting, grouping, allowed)
    return groups


def by_direction(setting: str, given: Factors, directions: Directions) -> npt.NDArray[np.float32]:
    """Returns the factor of each direction, in order. Raises SettingError for wrong `given` ones.

    A direction has the factor of its most specific name: its own ("en-gl"), that of a language
    ("gl", for both directions) or of a resource level ("low"). Others have 1. The numbers of a
    function, such as a sampler, are divided by their mean.
    """
    names = list(directions.names)
    if isinstance(given, Mapping):
        found = dict.fromkeys(names, 1.0)
        of = {name: directions.named(name, setting) for name in given}
        # Levels come first and directions last, so that the most specific name decides.
        for name in sorted(of, key=lambda name: (name not in directions.levels, -len(of[name]))):
            found |= dict.fromkeys(of[name], given[name])
        return np.array([found[name] for name in names], np.float32)
    made = given(dict(directions.sizes))
    if missing := [name for name in names if name not in made]:
        raise SettingError(setting, given, f"a function that gives {missing[0]} a number too")
    values = [made[name] for name in names]
    for name, value in zip(names, values, strict=True):
        check_value(f"{setting}[{name}]", value, Factor)
    mean = math.fsum(values) / len(values)
    if not mean:
        raise SettingError(setting, given, "a function that gives a direction more than 0")
    return np.array([value / mean for value in values], np.float32)

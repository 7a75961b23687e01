"""Kinds of JSON values, for checking files that anybody may have written.

A kind is a function of a value and its place in the file. It raises ValueError with the place, the
expected and the actual value: `record({"step": count, "phase?": text})(found, "")`.
"""

from collections.abc import Callable, Mapping
from typing import Any

Kind = Callable[[Any, str], None]
_LARGEST = 2**63 - 1  # largest integer of numpy
_FINITE = 1e300
_SHOWN = 60


def _kind(holds: Callable[[Any], bool], wanted: str) -> Kind:
    """Returns the kind of values for which `holds` is true; `wanted` describes them."""

    def check(value: Any, where: str) -> None:
        if not holds(value):
            huge = isinstance(value, int) and abs(value) > _LARGEST
            said = "a huge number" if huge else repr(value)
            said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
            raise ValueError(f"{where or 'it'} is {said}: must be {wanted}")

    return check


anything = _kind(lambda value: True, "anything")
text = _kind(lambda value: isinstance(value, str), "text")  # may be empty
flag = _kind(lambda value: isinstance(value, bool), "true or false")
count = _kind(lambda value: type(value) is int and 0 <= value <= _LARGEST, "a whole number from 0")
number = _kind(lambda value: type(value) in (int, float) and abs(value) < _FINITE, "a number")
_list = _kind(lambda value: isinstance(value, list), "a list")
_object = _kind(lambda value: isinstance(value, dict), "an object")


def optional(kind: Kind) -> Kind:
    """Returns the kind that also allows null."""
    return lambda value, where: None if value is None else kind(value, where)


def listed(kind: Kind) -> Kind:
    """Returns the kind of a list with items of a kind."""

    def check(value: Any, where: str) -> None:
        _list(value, where)
        for i, one in enumerate(value):
            kind(one, f"{where}[{i}]")

    return check


def entry(*kinds: Kind) -> Kind:
    """Returns the kind of a list of fixed length with a kind for each item."""
    n = len(kinds)
    whole = _kind(lambda value: isinstance(value, list) and len(value) == n, f"a list of {n}")

    def check(value: Any, where: str) -> None:
        whole(value, where)
        for i, (kind, one) in enumerate(zip(kinds, value, strict=True)):
            kind(one, f"{where}[{i}]")

    return check


def named(kind: Kind) -> Kind:
    """Returns the kind of an object with any names and values of a kind."""
    return record({"*": kind})


def record(kinds: Mapping[str, Kind]) -> Kind:
    """Returns the kind of an object with these names.

    "name?" may be missing or null. "*" stands for all other names; without it, these may have any
    values.
    """
    rest = kinds.get("*", anything)
    needed = {name: kind for name, kind in kinds.items() if name[-1] not in "?*"}
    known = {name[:-1]: optional(kind) for name, kind in kinds.items() if name[-1] == "?"} | needed

    def check(value: Any, where: str) -> None:
        _object(value, where)
        before = f"{where}." if where else ""
        if missing := [name for name in needed if name not in value]:
            raise ValueError(f"{before}{missing[0]} is missing")
        for name, one in value.items():
            known.get(name, rest)(one, before + name)

    return check

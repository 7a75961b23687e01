"""Kinds of JSON values, for files whose content may be anybody's.

A kind is a function of a value and its place in the file. It raises ValueError with the place, what
must be there and what is: `record({"step": count, "phase?": text})(found, "")`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Kind = Callable[[Any, str], None]
_LARGEST = 2**63 - 1  # of numpy's whole numbers
_FINITE = 1e300
_SHOWN = 60


def _refuse(value: Any, where: str, wanted: str) -> NoReturn:
    shown = repr(value) if not isinstance(value, int) or abs(value) <= _LARGEST else "a huge number"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    raise ValueError(f"{where or 'it'} is {shown}: must be {wanted}")


def anything(value: Any, where: str) -> None:
    """Any value."""


def text(value: Any, where: str) -> None:
    """A text, which may be empty."""
    if not isinstance(value, str):
        _refuse(value, where, "text")


def flag(value: Any, where: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        _refuse(value, where, "true or false")


def count(value: Any, where: str) -> None:
    """A whole number from 0."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        _refuse(value, where, "a whole number from 0")


def number(value: Any, where: str) -> None:
    """A finite number."""
    if type(value) not in (int, float) or not abs(value) < _FINITE:
        _refuse(value, where, "a number")


def optional(kind: Kind) -> Kind:
    """The kind, or null."""
    return lambda value, where: None if value is None else kind(value, where)


def listed(kind: Kind) -> Kind:
    """A list whose items are of the kind."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            _refuse(value, where, "a list")
        for i, one in enumerate(value):
            kind(one, f"{where}[{i}]")

    return check


def entry(*kinds: Kind) -> Kind:
    """A list of as many items, each of its own kind."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) != len(kinds):
            _refuse(value, where, f"a list of {len(kinds)}")
        for i, (kind, one) in enumerate(zip(kinds, value, strict=True)):
            kind(one, f"{where}[{i}]")

    return check


def named(kind: Kind) -> Kind:
    """An object whose values, under any names, are of the kind."""
    return record({"*": kind})


def record(kinds: Mapping[str, Kind]) -> Kind:
    """An object with these names; "name?" may be missing or null, "*" stands for all other names.

    Other names are allowed, with any values, where there is no "*".
    """
    rest = kinds.get("*", anything)
    needed = {name: kind for name, kind in kinds.items() if name[-1] not in "?*"}
    known = {name[:-1]: optional(kind) for name, kind in kinds.items() if name[-1] == "?"} | needed

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, where, "an object")
        before = f"{where}." if where else ""
        for name in needed:
            if name not in value:
                raise ValueError(f"{before}{name} is missing")
        for name, one in value.items():
            known.get(name, rest)(one, before + name)

    return check

"""Checks that a reference of a config can be what the annotation of a setting asks for.

Only what certainly cannot is refused: it cannot be called as the setting is, or what it returns, by
its own annotation, is something else. A function without annotations may be anything.
"""

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

# Given to a function that has a parameter of the name (`m4.data.samplers`).
_GIVEN_WHERE_ASKED = {"drawn"}


def is_call(annotation: Any) -> bool:
    """Returns whether an annotation is a Callable, or a Protocol with `__call__`."""
    if _origin(annotation) is collections.abc.Callable:
        return True
    return is_protocol(annotation) and "__call__" in vars(annotation)


def is_protocol(annotation: Any) -> bool:
    """Returns whether an annotation is a Protocol."""
    return bool(getattr(annotation, "_is_protocol", False))


def may_call(value: Any, annotation: Any) -> bool:
    """Returns whether a value can be called as a Callable or Protocol says, with its result."""
    if not callable(value):
        return False
    names, returns = _call_of(annotation)
    return _takes(value, names) and _may_be(_returned(value), returns)


def given_twice(value: Any, annotation: Any) -> str | None:
    """Returns a parameter of a partial that the caller gives, too, or None."""
    for one in _alternatives(annotation):
        if isinstance(value, functools.partial) and is_call(one):
            names = _call_of(one)[0] or []
            if not is_protocol(one):
                names = [*inspect.signature(value.func).parameters][: len(names)]
            return next((name for name in names if name in value.keywords), None)
    return None


def behaves(value: Any, kind: type) -> bool:
    """Returns whether an object or class has the public methods of a class or Protocol."""
    methods = {name for name, one in vars(kind).items() if callable(one)}
    asked = {name for name in methods if not name.startswith("_") or name == "__call__"}
    return bool(asked) and all(hasattr(value, name) for name in asked)


def called(annotation: Any) -> str:
    """Describes the reference that a Callable or Protocol asks for."""
    if is_protocol(annotation):
        return f"a reference to {named(annotation)}: @module.name, or in Python the function itself"
    returns = (typing.get_args(annotation) or (..., Any))[1]
    of = f" to what makes {named(returns)}" if isinstance(returns, type) else ""
    return f"a reference such as @module.name{of}"


def named(kind: Any) -> str:
    """Returns the name of a class with its article."""
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"


def _call_of(annotation: Any) -> tuple[list[str] | None, Any]:
    """Returns (names of the arguments, "" where they have none; what is returned) of a call.

    The names are None where any arguments may be given.
    """
    if is_protocol(annotation):
        call = annotation.__call__
        return [*inspect.signature(call).parameters][1:], _hints(call).get("return", Any)
    given, returns = typing.get_args(annotation) or (..., Any)
    return (None if given is ... else [""] * len(given)), returns


def _takes(value: Any, names: list[str] | None) -> bool:
    """Returns whether a value takes these arguments, by position or by name."""
    if names is None:
        return True
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True
    more = dict.fromkeys(_GIVEN_WHERE_ASKED & {*signature.parameters} - {*names})
    ways: list[tuple[list[str], dict[str, None]]] = [(names, more)]
    if all(names):
        ways.append(([], {**more, **dict.fromkeys(names)}))
    for positional, keywords in ways:
        try:
            signature.bind(*positional, **keywords)
        except TypeError:
            continue
        return True
    return False


def _returned(value: Any) -> Any:
    """Returns the annotation of what a call returns, or Any where there is none."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, type):
        return value
    call = value if inspect.isroutine(value) else type(value).__call__
    return _hints(call).get("return", Any)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return {}


def _may_be(found: Any, wanted: Any) -> bool:
    """Returns whether a value of one annotation may be a value of another."""
    pairs = [(one, other) for one in _alternatives(found) for other in _alternatives(wanted)]
    return any(_related(_origin(one), _origin(other)) for one, other in pairs)


def _related(found: Any, wanted: Any) -> bool:
    if not isinstance(found, type) or not isinstance(wanted, type):
        return True
    if {found, wanted} & {Any, object}:
        return True
    if is_protocol(found) or is_protocol(wanted):
        return behaves(found, wanted)
    try:
        derived = issubclass(found, wanted)
        if derived or (issubclass(wanted, found) and found is not collections.abc.Callable):
            return True
    except TypeError:
        return True
    return behaves(found, wanted)


def _alternatives(annotation: Any) -> list[Any]:
    """Returns the members of a Union, without Annotated."""
    if typing.get_origin(annotation) is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(annotation) for one in _alternatives(part)]
    return [annotation]


def _origin(annotation: Any) -> Any:
    if typing.get_origin(annotation) is Annotated:
        return _origin(typing.get_args(annotation)[0])
    return typing.get_origin(annotation) or annotation

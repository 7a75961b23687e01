"""Whether what a config refers to can be what a setting's annotation asks for.

Only what certainly cannot is refused: it cannot be called as the setting is, or what it returns, by
its own annotation, is something else. A function without annotations may be anything.
"""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

# What a function gets where it has a parameter of the name (`m4.data.samplers`).
_GIVEN_WHERE_ASKED = {"drawn"}


def is_call(annotation: Any) -> bool:
    """Whether it is a Callable, or a Protocol of what is called."""
    if _origin(annotation) is collections.abc.Callable:
        return True
    return is_protocol(annotation) and "__call__" in vars(annotation)


def is_protocol(annotation: Any) -> bool:
    return bool(getattr(annotation, "_is_protocol", False))


def may_call(value: Any, annotation: Any) -> bool:
    """Whether a value can be called as a Callable or Protocol says, with its result."""
    if not callable(value):
        return False
    if is_protocol(annotation):
        call = annotation.__call__
        parameters = [*inspect.signature(call).parameters][1:]
        returns = _hints(call).get("return", Any)
    else:
        given, returns = typing.get_args(annotation) or (..., Any)
        parameters = None if given is ... else [""] * len(given)
    takes = parameters is None or _takes(value, parameters)
    return takes and _may_be(_returned(value), returns)


def given_twice(value: Any, annotation: Any) -> str | None:
    """The parameter of a partial that the caller gives, too; None: there is none."""
    if typing.get_origin(annotation) is Annotated:
        return given_twice(value, typing.get_args(annotation)[0])
    if _origin(annotation) in (typing.Union, types.UnionType):
        return next(
            filter(None, (given_twice(value, a) for a in typing.get_args(annotation))), None
        )
    if not isinstance(value, functools.partial) or not is_call(annotation):
        return None
    if is_protocol(annotation):
        names = [*inspect.signature(annotation.__call__).parameters][1:]
    else:
        given = (typing.get_args(annotation) or (...,))[0]
        names = [*inspect.signature(value.func).parameters][: 0 if given is ... else len(given)]
    return next((name for name in names if name in value.keywords), None)


def behaves(value: Any, kind: type) -> bool:
    """Whether an object, or those of a class, has all that a class or Protocol has."""
    return all(hasattr(value, name) or name in _fields(value) for name in _members(kind))


def is_made(value: Any) -> bool:
    """Whether it is an object, no reference to what makes one."""
    return not isinstance(value, type | functools.partial | types.FunctionType)


def called(annotation: Any) -> str:
    """What is asked for, in words."""
    if is_protocol(annotation):
        return f"a reference such as @module.name to {named(annotation)}"
    returns = (typing.get_args(annotation) or (..., Any))[1]
    name = "" if returns is Any else getattr(returns, "__name__", "")
    of = f" to what makes {named(returns)}" if isinstance(returns, type) and name else ""
    return f"a reference such as @module.name{of}"


def named(kind: Any) -> str:
    """Its name with an article."""
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"


def _takes(value: Any, parameters: list[str]) -> bool:
    """Whether it can be called with so many arguments, by position or by name."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return True
    more = dict.fromkeys(_GIVEN_WHERE_ASKED & {*signature.parameters} - {*parameters})
    named: list[tuple[list[None], Mapping[str, None]]] = [([None] * len(parameters), {})]
    if all(parameters):
        named.append(([], dict.fromkeys(parameters)))
    for positional, keywords in named:
        try:
            signature.bind(*positional, **{**more, **keywords})
        except TypeError:
            continue
        return True
    return False


def _returned(value: Any) -> Any:
    """The annotation of what a call returns; Any where there is none."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, type):
        return value
    if not inspect.isroutine(value):
        value = type(value).__call__
    return _hints(value).get("return", Any)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        found = typing.get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return {}
    return {name: types.NoneType if kind is None else kind for name, kind in found.items()}


def _origin(annotation: Any) -> Any:
    if typing.get_origin(annotation) is Annotated:
        return _origin(typing.get_args(annotation)[0])
    return typing.get_origin(annotation) or annotation


def _may_be(found: Any, wanted: Any) -> bool:
    """Whether what one annotation says may be what another one says."""
    found, wanted = _alternatives(found), _alternatives(wanted)
    return any(_related(one, other) for one in found for other in wanted)


def _alternatives(annotation: Any) -> list[Any]:
    if _origin(annotation) in (typing.Union, types.UnionType):
        return [_origin(one) for one in typing.get_args(annotation)]
    return [_origin(annotation)]


def _related(found: Any, wanted: Any) -> bool:
    if (
        not isinstance(found, type)
        or not isinstance(wanted, type)
        or {found, wanted} & {Any, object}
    ):
        return True
    if is_protocol(wanted) or is_protocol(found):
        return behaves(found, wanted)
    try:
        if issubclass(found, wanted):
            return True
        if issubclass(wanted, found) and found is not collections.abc.Callable:
            return True
    except TypeError:
        return True
    return bool(_members(wanted)) and behaves(found, wanted)


def _fields(value: Any) -> set[str]:
    classes = value.__mro__ if isinstance(value, type) else ()
    return {name for one in classes for name in inspect.get_annotations(one)}


def _members(kind: type) -> set[str]:
    """The public names that a class itself adds; of a Protocol its methods alone: what else it has
    may be set when an object is made."""
    if is_protocol(kind):
        return {name for name, one in vars(kind).items() if callable(one) and _public(name)}
    fields = (
        {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    )
    return {name for name in (*vars(kind), *fields) if _public(name)}


def _public(name: str) -> bool:
    return not name.startswith("_") or name == "__call__"

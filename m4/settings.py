"""Settings: kind, range and mutability stand in the annotation of the parameter.

    @checked
    def rsqrt(step, peak: Annotated[float, Between(0, 10)], warmup_steps: Steps = 1000): ...

A wrong value raises `SettingError`, which names the parameter as the library does; the command line
adds the gin name, file and line. `m4.config` checks the same annotations before anything starts.
"""

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import math
import os
import shlex
import shutil
import sys
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from m4 import references

_Configurable = TypeVar("_Configurable", bound=Callable[..., Any])


class InputError(ValueError):
    """A user's mistake: what, where, what is allowed, in one line; exit status 2."""

    status = 2


class SavedText(str):
    """A text of a saved config: it names no folder to write to, and no code to run.

    The run may be a stranger's. `m4.config` makes every text of such a config one of these, in
    whatever value it stands.

    Attributes:
        allowed: The modules outside m4 that the user allows it, each with its folder or "".
    """

    allowed: Mapping[str, str]

    def __new__(cls, text: str, allowed: Mapping[str, str] | None = None) -> "SavedText":
        """Copies a text. By default it allows nothing."""
        made = super().__new__(cls, text)
        made.allowed = allowed or {}
        return made


def allowed_modules(named: Iterable[str]) -> dict[str, str]:
    """Returns the folder, or "", of each module that is named as NAME or NAME=FOLDER.

    A saved config allows what its user does, and nothing more.
    """
    found = {}
    for one in named:
        name, _, folder = one.partition("=")
        if not isinstance(one, SavedText):
            found[name] = folder
        elif name in one.allowed:
            found[name] = one.allowed[name]
    return found


def import_module(name: str) -> types.ModuleType:
    """Imports a module that a config names; every module of a user's comes in here.

    Raises:
        InputError: A saved config names it, it is not part of m4, and it is not allowed.
        ImportError: It cannot be imported.
    """
    top = name.split(".")[0]
    if isinstance(name, SavedText) and top != "m4" and top not in name.allowed:
        raise InputError(
            f"this run's config imports {name}, which is not part of m4: a run folder is "
            f"data, and its code runs only where you allow it (--allow_module={top}, or "
            f"{top}=FOLDER where it is not in the working folder; in Python "
            f"m4.load(..., allow_modules=[{top!r}]))"
        )
    return importlib.import_module(name)


def is_one_line(name: str) -> bool:
    """Returns whether a name has no line break and no other control character.

    Others could write lines of their own into configs, tables and commands to paste.
    """
    return not any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in name)


def check_name(name: str) -> None:
    """Raises InputError for a name of a folder, file or system that `is_one_line` refuses."""
    if not is_one_line(name):
        raise InputError(f"{name!r}: a name has no line breaks or other control characters")


def counted(count: float, noun: str) -> str:
    """Returns a number of things: "1 line", "2,011 lines"."""
    shown = f"{count:,.0f}"
    return f"{shown} {noun}{'s' * (shown != '1')}"


def pasted(*words: object) -> str:
    """Returns a command of m4 as a shell reads it, whatever names are in its words.

    It begins as this process was started: on most machines a bare `m4` is GNU's.
    """
    return shlex.join([*_program(), *map(str, words)])


def _program() -> list[str]:
    started = sys.argv[0] if sys.argv else ""
    if Path(started).name in ("m4", "m4-nmt"):
        return [_shortest(started)]
    return [_shortest(sys.executable), "-m", "m4"]


def _shortest(path: str) -> str:
    """Returns a program's name where that is enough, else its path from the working folder."""
    name = Path(path).name
    if Path(path).is_absolute() and shutil.which(name) == path:
        return name
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if here in Path(path).parents else path


class SettingError(InputError):
    """A setting has a value that it cannot have.

    Attributes:
        setting: The parameter, as "Transformer.width" or "rsqrt.peak".
        value: The value that was given.
        allowed: What may be given, as "a whole number from 1 to 1048576".
    """

    def __init__(self, setting: str, value: Any, allowed: str):
        super().__init__(f"{setting} = {value!r}: must be {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed

    def __reduce__(self):  # errors cross from worker processes
        return type(self), (self.setting, self.value, self.allowed)


def shown(value: object) -> str:
    """Returns a value of a user's own part for a message, cut where it is long."""
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:80]}..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@dataclasses.dataclass(frozen=True)
class Between:
    """A number from `least` to `most`, both allowed unless `above` or `below` says otherwise."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Returns whether a number is in the range."""
        low = self.least < value if self.above else self.least <= value
        high = value < self.most if self.below else value <= self.most
        return low and high

    def __str__(self) -> str:
        ends = []
        if self.least > -math.inf:
            ends.append(f"{'above' if self.above else 'from'} {self.least:g}")
        if self.most < math.inf:
            most = f"{self.most:,.0f}" if self.most >= 1000 else f"{self.most:g}"
            ends.append(f"{'below' if self.below else 'to'} {most}")
        return " ".join(ends)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.values)}"


# The mark of a setting that may change in a folder where a model is trained. All other settings
# decide what is trained. What a mutable setting refers to is mutable too: with a mesh, all its
# settings may change.
MUTABLE = "mutable"


@dataclasses.dataclass(frozen=True)
class Given:
    """The mark of a parameter that m4 itself gives, so that a config cannot.

    Attributes:
        by: The setting that decides it, as "experiment.Training.seed", or what does.
    """

    by: str


# Sizes of arrays: above these a program only runs out of memory, after minutes.
Size = Annotated[int, Between(1, 2**20)]
Count = Annotated[int, Between(0, 2**31 - 1)]
Steps = Annotated[int, Between(0, 10**9)]
Period = Annotated[int, Between(1, 10**9)]
Rate = Annotated[float, Between(0, 1, below=True)]  # of dropout, of label smoothing
Factor = Annotated[float, Between(0, 1e6)]


def _is_number(value: Any, kind: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, kind) and not isinstance(value, bool) and not is_nan


# Kind -> (its name in messages, whether a value is of the kind).
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: _is_number(value, int)),
    float: ("a number", lambda value: _is_number(value, int | float)),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text that is not empty", lambda value: isinstance(value, str) and value != ""),
}


def check_value(setting: str, value: Any, annotation: Any) -> None:
    """Raises SettingError unless a value fits an annotation; unknown kinds are not checked.

    A bool is no number, an int is a float, NaN is neither, and empty strings are rejected.
    """
    if not fits(value, annotation):
        raise SettingError(setting, value, describe(annotation))


def check_arguments(configurable: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Checks the value of every argument that has an annotation."""
    annotations = annotations_of(configurable)
    for name, value in arguments.items():
        if name in annotations:
            check_value(f"{configurable.__qualname__}.{name}", value, annotations[name])


def configurable(function: _Configurable) -> _Configurable:
    """Marks a function without settings as one that a config may name.

    A saved config may refer to nothing that is neither `checked` nor marked.
    """
    function.__checked__ = True  # type: ignore[attr-defined]
    return function


def checked(configurable: _Configurable) -> _Configurable:
    """Checks the arguments of a function at every call, or of a class when an object is made."""
    made: Any = configurable
    plain: Any = made.__init__ if isinstance(made, type) else made
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_arguments(configurable, signature.bind_partial(*args, **kwargs).arguments)
        return plain(*args, **kwargs)

    result: Any = call
    if isinstance(made, type):
        made.__init__ = call
        result = made
    result.__checked__ = True
    return result


def is_checked(configurable: Any) -> bool:
    """Returns whether a class or function is `checked` or marked `configurable`."""
    return "__checked__" in getattr(configurable, "__dict__", {})


def mutable_of(configurable: Callable[..., Any]) -> list[str]:
    """Returns the parameters whose annotations have the mark MUTABLE."""
    return [
        name
        for name, annotation in annotations_of(configurable).items()
        if MUTABLE in getattr(annotation, "__metadata__", ())
    ]


def given_of(configurable: Callable[..., Any], name: str) -> str | None:
    """Returns what decides a parameter that m4 itself gives; None: a config may set it."""
    annotation = annotations_of(configurable).get(name)
    marks = getattr(annotation, "__metadata__", ())
    return next((mark.by for mark in marks if isinstance(mark, Given)), None)


def annotations_of(configurable: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the annotation of each parameter, Annotated kept; none where they cannot be read."""
    plain = inspect.unwrap(configurable)
    if isinstance(plain, functools.partial):
        return annotations_of(plain.func)
    if isinstance(plain, type) and not dataclasses.is_dataclass(plain):
        plain = plain.__init__
    try:
        return _annotations(plain)
    except (NameError, TypeError):  # a name that is imported for type checkers only
        return {}


@functools.cache  # a config asks for each thousands of times
def _annotations(target: Callable[..., Any]) -> Mapping[str, Any]:
    found = typing.get_type_hints(target, include_extras=True)
    return {name: value for name, value in found.items() if name != "return"}


_UNIONS = (typing.Union, types.UnionType)
_MAPPINGS = (collections.abc.Mapping, dict)
_LISTS = (collections.abc.Sequence, list, tuple)


def describe(annotation: Any) -> str:
    """Describes in words what an annotation allows."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind, *marks = args
        said = [str(mark) for mark in marks if isinstance(mark, Between | OneOf)]
        named = any(isinstance(mark, OneOf) for mark in marks)
        return " ".join(said if named else [describe(kind), *said])
    if origin in _UNIONS:
        return " or ".join("None" if arg is types.NoneType else describe(arg) for arg in args)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if annotation in _KINDS:
        return _KINDS[annotation][0]
    if origin in _MAPPINGS:
        kinds = " to ".join(map(describe, args))
        return f"a dictionary, {kinds}" if args else "a {name: value} dictionary"
    if origin in _LISTS:
        return f"a list, each {describe(args[0])}" if args else "a list"
    if origin is os.PathLike:
        return "a path"
    if references.is_call(annotation):
        return references.called(annotation)
    if references.is_protocol(annotation) or dataclasses.is_dataclass(annotation):
        return f"{references.named(annotation)}, with brackets: @module.name()"
    return references.named(annotation)


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a setting of this annotation may have the value."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, str | TypeVar):
        return True
    if annotation is None or annotation is types.NoneType:
        return value is None
    if origin is Annotated:
        return fits(value, args[0]) and (value is None or all(_holds(m, value) for m in args[1:]))
    if origin in _UNIONS:
        return any(fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if annotation in _KINDS:
        return _KINDS[annotation][1](value)
    if origin in _MAPPINGS:
        return isinstance(value, collections.abc.Mapping) and all(
            fits(k, args[0]) and fits(v, args[1]) for k, v in value.items()
        )
    if origin in _LISTS and (origin is not tuple or args[-1:] == (...,)):
        listed = isinstance(value, collections.abc.Sequence) and not isinstance(value, str)
        return listed and all(fits(item, args[0]) for item in value)
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    if references.is_call(annotation):
        return references.may_call(value, annotation)
    if references.is_protocol(annotation):
        literal = bool | int | float | str | list | tuple | dict | None
        return not isinstance(value, literal) and references.behaves(value, annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return isinstance(value, annotation)
    return True


def _holds(mark: Any, value: Any) -> bool:
    """Returns whether a value is what a mark of Annotated allows."""
    if isinstance(mark, Between):
        return mark.holds(value)
    return not isinstance(mark, OneOf) or value in mark.values


def nearest_valid(size: int, parts: int) -> str:
    """Names the sizes next to `size` that divide by `parts`, for messages.

    Below the first valid size it names that one alone.
    """
    down, up = size // parts * parts, (size // parts + 1) * parts
    return f"nearest valid sizes: {down} and {up}" if down > 0 else f"nearest valid size: {parts}"

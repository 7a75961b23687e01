"""Settings, whose kind, range and mutability stand in the annotation of the parameter.

    @checked
    def rsqrt(step, peak: Annotated[float, Between(0, 10)], warmup_steps: Steps = 1000): ...

A wrong value raises `SettingError`, which names the parameter as the library does; the command line
adds the gin name, file and line. `m4.config` checks the same annotations before anything starts.
"""

import collections.abc
import contextlib
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

_Configurable = TypeVar("_Configurable", bound=Callable[..., Any])


class InputError(ValueError):
    """A user's mistake: what, where and what is allowed, in one line. The exit status is 2."""

    status = 2


class SavedText(str):
    """A text from a saved config, which may name neither a folder to write to nor code to run.

    The run may be a stranger's, so `m4.config` makes every text of its config, within any value,
    a `SavedText`.

    Attributes:
        allowed: Modules outside m4 that the user allows, each with its folder or "".
    """

    allowed: Mapping[str, str]

    def __new__(cls, text: str, allowed: Mapping[str, str] | None = None) -> "SavedText":
        made = super().__new__(cls, text)
        made.allowed = allowed or {}
        return made


def allowed_modules(named: Iterable[str]) -> dict[str, str]:
    """Returns the folder, or "", of each module given as NAME or NAME=FOLDER.

    A saved config cannot allow more than the user did.
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
    """Imports a module that a config names. All of a user's modules are imported here.

    Raises:
        InputError: A saved config names a module outside m4 that is not allowed.
        ImportError: The module cannot be imported.
    """
    top = name.split(".")[0]
    if isinstance(name, SavedText) and top != "m4" and top not in name.allowed:
        said = (
            f"which is not part of m4: it runs only where you allow it (--allow_module={top}, or "
        )
        said += f"{top}=FOLDER elsewhere; in Python m4.load(..., allow_modules=[{top!r}]))"
        raise InputError(f"this run's config imports {name}, {said}")
    return importlib.import_module(name)


def is_one_line(name: str) -> bool:
    """Returns whether a name has no control characters, such as line breaks."""
    return not any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in name)


def check_name(name: str) -> None:
    """Raises InputError for a name of a folder, file or system that `is_one_line` refuses."""
    if not is_one_line(name):
        raise InputError(f"{name!r}: a name has no line breaks or other control characters")


def counted(count: float, noun: str) -> str:
    """Returns a count with its noun: "1 line", "2,011 lines"."""
    shown = f"{count:,.0f}"
    return f"{shown} {noun}{'s' * (shown != '1')}"


def some(names: Sequence[str], most: int) -> str:
    """Returns the first `most` names and the number of the others: "a, b and 7 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def pasted(*words: object) -> str:
    """Returns a command of m4, quoted for a shell.

    It begins the way this process was started: on most machines a bare `m4` is GNU's.
    """
    started = sys.argv[0] if sys.argv else ""
    program = [_shortest(sys.executable), "-m", "m4"]
    if Path(started).name in ("m4", "m4-nmt"):
        program = [_shortest(started)]
    return shlex.join([*program, *map(str, words)])


def _shortest(path: str) -> str:
    """Returns a program's name if that is enough, otherwise its path from the working folder."""
    name = Path(path).name
    if Path(path).is_absolute() and shutil.which(name) == path:
        return name
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if here in Path(path).parents else path


class SettingError(InputError):
    """An invalid value of a setting.

    Attributes:
        setting: The parameter, such as "Transformer.width" or "rsqrt.peak".
        value: The value that was given.
        allowed: Description of valid values, such as "a whole number from 1 to 1048576".
    """

    def __init__(self, setting: str, value: Any, allowed: str):
        super().__init__(f"{setting} = {value!r}: must be {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed

    def __reduce__(self):  # lets worker processes pickle the error
        return type(self), (self.setting, self.value, self.allowed)


def shown(value: object) -> str:
    """Returns any value as text for a message, shortened if it is long."""
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:80]}..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@dataclasses.dataclass(frozen=True)
class Between:
    """A number from `least` to `most`, inclusive unless `above` or `below` is set."""

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

    def holds(self, value: str) -> bool:
        """Returns whether a text is one of them."""
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(self.values)}"


# Marks a setting that may change in the folder of a trained model. All other settings decide what
# is trained. Everything that a mutable setting refers to is mutable too: with a mesh, all its
# settings may change.
MUTABLE = "mutable"


@dataclasses.dataclass(frozen=True)
class Given:
    """Marks a parameter that m4 itself gives, so that a config cannot.

    Attributes:
        by: The setting that decides it, such as "experiment.Training.seed", or a description.
    """

    by: str


# Largest sizes of arrays. Above these, a program would run out of memory after minutes.
Size = Annotated[int, Between(1, 2**20)]
Count = Annotated[int, Between(0, 2**31 - 1)]
Steps = Annotated[int, Between(0, 10**9)]
Period = Annotated[int, Between(1, 10**9)]
Rate = Annotated[float, Between(0, 1, below=True)]  # for dropout and label smoothing
Factor = Annotated[float, Between(0, 1e6)]


# Type -> (its name in messages, a test of values). A bool is not a number, an int counts as a
# float, and NaN is rejected.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda v: isinstance(v, int) and type(v) is not bool),
    float: ("a number", lambda v: isinstance(v, int | float) and type(v) is not bool and v == v),
    bool: ("True or False", lambda v: isinstance(v, bool)),
    str: ("text that is not empty", lambda v: isinstance(v, str) and v != ""),
}


def check_value(setting: str, value: Any, annotation: Any) -> None:
    """Raises SettingError unless a value fits an annotation; unknown types are not checked."""
    if not fits(value, annotation):
        raise SettingError(setting, value, describe(annotation))


def check_arguments(configurable: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Checks the value of every argument that has an annotation."""
    annotations = annotations_of(configurable)
    for name, value in arguments.items():
        if name in annotations:
            check_value(f"{configurable.__qualname__}.{name}", value, annotations[name])


def configurable(function: _Configurable) -> _Configurable:
    """Marks a function without settings so that a config may name it.

    A saved config may refer only to what is `checked` or marked by this.
    """
    function.__checked__ = True  # type: ignore[attr-defined]
    return function


def checked(configurable: _Configurable) -> _Configurable:
    """Checks the arguments at every call of a function or constructor."""
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
    found = annotations_of(configurable).items()
    return [name for name, one in found if MUTABLE in getattr(one, "__metadata__", ())]


def given_of(configurable: Callable[..., Any], name: str) -> str | None:
    """Returns what decides a parameter that m4 gives, or None if a config may set it."""
    marks = getattr(annotations_of(configurable).get(name), "__metadata__", ())
    return next((mark.by for mark in marks if isinstance(mark, Given)), None)


def annotations_of(configurable: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the annotation of each parameter, including Annotated; {} if they cannot be read."""
    plain = inspect.unwrap(configurable)
    if isinstance(plain, functools.partial):
        return annotations_of(plain.func)
    if isinstance(plain, type) and not dataclasses.is_dataclass(plain):
        plain = plain.__init__
    try:
        return _annotations(plain)
    except (NameError, TypeError):  # a name imported only for type checkers
        return {}


@functools.cache  # a config asks for each one thousands of times
def _annotations(target: Callable[..., Any]) -> Mapping[str, Any]:
    found = typing.get_type_hints(target, include_extras=True)
    return {name: value for name, value in found.items() if name != "return"}


_UNIONS = (typing.Union, types.UnionType)
_MAPPINGS = (collections.abc.Mapping, dict)
_LISTS = (collections.abc.Sequence, list, tuple)


def describe(annotation: Any) -> str:
    """Describes in words which values an annotation allows."""
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
    name = _named(annotation)
    if _is_call(annotation) and _is_protocol(annotation):
        return f"a reference to {name}: @module.name, or in Python the function itself"
    if _is_call(annotation):
        returns = (args or (..., Any))[1]
        of = f" to what makes {_named(returns)}" if isinstance(returns, type) else ""
        return f"a reference such as @module.name{of}"
    if _is_protocol(annotation) or dataclasses.is_dataclass(annotation):
        return f"{name}, with brackets: @module.name()"
    return name


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether an annotation allows a value."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, str | TypeVar):
        return True
    if annotation is None or annotation is types.NoneType:
        return value is None
    if origin is Annotated:
        kind, *marks = args
        allowed = (mark.holds(value) for mark in marks if isinstance(mark, Between | OneOf))
        return fits(value, kind) and (value is None or all(allowed))
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
    if _is_call(annotation):
        return _may_call(value, annotation)
    if _is_protocol(annotation):
        literal = bool | int | float | str | list | tuple | dict | None
        return not isinstance(value, literal) and _behaves(value, annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return isinstance(value, annotation)
    return True


def nearest_valid(size: int, parts: int) -> str:
    """Describes the sizes nearest to `size` that divide by `parts`, for messages."""
    down, up = size // parts * parts, (size // parts + 1) * parts
    return f"nearest valid sizes: {down} and {up}" if down > 0 else f"nearest valid size: {parts}"


# ------------------------------------------------------------------------------------- references

# A reference in a config is refused only if it is certainly wrong: it cannot be called as the
# setting is, or its annotated result has another type. A function without annotations may be
# anything.

# Passed only to a function that has a parameter of this name (`m4.data.samplers`).
_GIVEN_WHERE_ASKED = {"drawn"}


def _is_call(annotation: Any) -> bool:
    """Returns whether an annotation is a Callable, or a Protocol with `__call__`."""
    if _origin(annotation) is collections.abc.Callable:
        return True
    return _is_protocol(annotation) and "__call__" in vars(annotation)


def _is_protocol(annotation: Any) -> bool:
    """Returns whether an annotation is a Protocol."""
    return bool(getattr(annotation, "_is_protocol", False))


def _may_call(value: Any, annotation: Any) -> bool:
    """Returns whether a value fits a Callable or Protocol in its arguments and result."""
    if not callable(value):
        return False
    names, returns = _call_of(annotation)
    return _takes(value, names) and _may_be(_returned(value), returns)


def given_twice(value: Any, annotation: Any) -> str | None:
    """Returns a parameter that both a partial and its caller give, or None."""
    for one in _alternatives(annotation):
        if isinstance(value, functools.partial) and _is_call(one):
            names = _call_of(one)[0] or []
            if not _is_protocol(one):
                names = [*inspect.signature(value.func).parameters][: len(names)]
            return next((name for name in names if name in value.keywords), None)
    return None


def _behaves(value: Any, kind: type) -> bool:
    """Returns whether an object or class has the public methods of a class or Protocol."""
    methods = {name for name, one in vars(kind).items() if callable(one)}
    asked = {name for name in methods if not name.startswith("_") or name == "__call__"}
    return bool(asked) and all(hasattr(value, name) for name in asked)


def _named(kind: Any) -> str:
    """Returns the name of a class with its article."""
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"


def _call_of(annotation: Any) -> tuple[list[str] | None, Any]:
    """Returns the argument names of a call ("": unnamed, None: any arguments), and its result."""
    if _is_protocol(annotation):
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
    for positional, keywords in ((names, []), ([], names)) if all(names) else ((names, []),):
        with contextlib.suppress(TypeError):
            signature.bind(*positional, **more, **dict.fromkeys(keywords))
            return True
    return False


def _returned(value: Any) -> Any:
    """Returns the annotation of a call's result, or Any if there is none."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, type):
        return value
    call = value if inspect.isroutine(value) else type(value).__call__
    return _hints(call).get("return", Any)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # imported only for type checkers
        return {}


def _may_be(found: Any, wanted: Any) -> bool:
    """Returns whether a value of the type `found` may be of the type `wanted`."""
    pairs = [(one, other) for one in _alternatives(found) for other in _alternatives(wanted)]
    return any(_related(_origin(one), _origin(other)) for one, other in pairs)


def _related(found: Any, wanted: Any) -> bool:
    if not isinstance(found, type) or not isinstance(wanted, type):
        return True
    if {found, wanted} & {Any, object}:
        return True
    if _is_protocol(found) or _is_protocol(wanted):
        return _behaves(found, wanted)
    try:
        derived = issubclass(found, wanted)
        if derived or (issubclass(wanted, found) and found is not collections.abc.Callable):
            return True
    except TypeError:
        return True
    return _behaves(found, wanted)


def _alternatives(annotation: Any) -> list[Any]:
    """Returns the members of a Union, without Annotated."""
    if typing.get_origin(annotation) is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(annotation) for one in _alternatives(part)]
    return [annotation]


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation

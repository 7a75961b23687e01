"""gin files and bindings -> `Experiment`; the only importer of gin, and only of its parser.

gin's own configuration is one for the process, applies a scope only while a function runs, and says
where a mistake is in prose. Here a config is an object: every binding knows its file and line, a
reference becomes a plain object or `functools.partial` that can cross to another process, and a
scope holds for everything below the reference that names it.

A config that is read from a run's folder is data: it may name m4's settings and what the user
allows by name, nothing else (`allowed_modules`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import sys
import tokenize
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from m4 import experiment as experiment_module
from m4.data.corpus import CorpusSpec
from m4.experiment import (
    Baselines,
    Data,
    Decoding,
    Experiment,
    ResourceLevels,
    Training,
    partial_arguments,
)
from m4.renamed import renamed
from m4.settings import (
    InputError,
    SettingError,
    annotations_of,
    check_value,
    is_checked,
    mutable_settings,
)

REQUIRED = "gin.REQUIRED"


class ConfigError(InputError):
    """A mistake in a config: its place, what is wrong, what may have been meant, in one line."""


class Reference(NamedTuple):
    """`@scope/module.name` or, evaluated, `@scope/module.name()`."""

    scopes: tuple[str, ...]
    selector: str
    evaluated: bool

    def __repr__(self) -> str:
        return f"@{'/'.join([*self.scopes, self.selector])}{'()' if self.evaluated else ''}"


class Macro(NamedTuple):
    """`%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


class Binding(NamedTuple):
    """`scope/module.name.parameter = value`, and where it stands."""

    scopes: tuple[str, ...]
    selector: str
    parameter: str
    target: Any
    value: Any
    place: str

    @property
    def name(self) -> str:
        return "/".join([*self.scopes, f"{self.selector}.{self.parameter}"])


class _Values(config_parser.ParserDelegate):
    """gin's parser hands over references and macros; what they mean is decided later."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, selector = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class Config:
    """The bindings of gin files and the command line, and the experiment that they describe.

    Attributes:
        settings: "schedules.rsqrt.peak" -> its value as text, macros resolved; as in run.json.
        mutable: those of them that may change between two runs in one folder.
        modules: modules outside m4 that the config imports.
    """

    def __init__(self, allowed_modules: Collection[str] | None = None):
        """allowed_modules: what may be imported besides m4; None: everything."""
        self._allowed = None if allowed_modules is None else frozenset(allowed_modules)
        self._namespace: dict[str, Any] = {"experiment": experiment_module}
        self._imports: dict[str, None] = {}
        self._macros: dict[str, tuple[Any, str]] = {}
        self._bindings: dict[tuple[tuple[str, ...], int, str], Binding] = {}
        self._targets: dict[int, Any] = {}
        self._references: list[Reference] = []
        self._named_macros: set[str] = set()
        self._used: set[str] = set()  # macros
        self._reached: set[tuple[tuple[str, ...], int, str]] = set()
        self._visited: dict[tuple[tuple[str, ...], int], Any] = {}
        self._made_parts: set[Any] = set()
        self.modules: list[str] = []
        self.settings: dict[str, str] = {}
        self.mutable: set[str] = set()

    # ------------------------------------------------------------------------------------ reading

    def read_file(self, name: str, folders: Sequence[str] = (".",), _within: tuple = ()) -> None:
        """Adds a gin file. ConfigError: its first mistake, with file and line."""
        found = find_file(name, folders)
        if found is None:
            raise ConfigError(f"{name}: no such file in {', '.join(folders)}")
        if found.resolve() in _within:
            raise ConfigError(f"{found}: includes itself")
        if self._allowed is None:
            for folder in (str(found.parent.resolve()), str(Path.cwd())):
                if folder not in sys.path:
                    sys.path.append(folder)
        within = (*_within, found.resolve())
        try:
            text = found.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{found}: cannot be read: {error}") from error

        def include(statement: config_parser.IncludeStatement) -> None:
            if self._allowed is not None:
                raise ConfigError("a saved config includes no other file")
            self.read_file(statement.filename, folders, within)

        self._read(text, lambda line: f"{found} line {line}", include)

    def read_binding(self, text: str) -> None:
        """Adds a binding of the command line; text for a macro that holds text needs no quotes."""
        name, equals, value = (part.strip() for part in text.partition("="))
        place = f"'{text}'"
        if equals and "." not in name and _is_text_macro(self._macros.get(name), name, value):
            self._macros[name] = (value, place)
            return
        self._read(text, lambda line: place, None)

    def set_model_dir(self, folder: str) -> None:
        """Another MODEL_DIR, whether the config has that macro or not."""
        name = "MODEL_DIR" if "MODEL_DIR" in self._macros else "experiment.Experiment.model_dir"
        self.read_binding(f"{name} = {folder!r}")

    def _read(self, text: str, place_of: Any, include: Any) -> None:
        line = 1
        try:
            for statement in config_parser.ConfigParser(text, _Values()):
                line = statement.location.line_num
                if isinstance(statement, config_parser.ImportStatement):
                    self._import(statement)
                elif isinstance(statement, config_parser.IncludeStatement):
                    include(statement)
                elif isinstance(statement, config_parser.BindingStatement):
                    self._bind(statement, place_of(line))
                else:  # the head of a block, whose bindings follow
                    self._target(statement.selector)
        except SyntaxError as error:
            said = (error.msg or str(error)).splitlines()[0]
            if "malformed node" in said or "Unable to parse value" in said:
                said = "the value cannot be read; text needs quotes"
            else:
                said = f"cannot be read: {said}"
            raise ConfigError(f"config: {place_of(error.lineno or line)}: {said}") from error
        except ConfigError as error:
            if str(error).startswith("config: "):
                raise
            raise ConfigError(f"config: {place_of(line)}: {error}") from error
        except tokenize.TokenError as error:
            raise ConfigError(f"config: {place_of(line)}: cannot be read: {error}") from error

    def _import(self, statement: config_parser.ImportStatement) -> None:
        module = statement.module
        if module.startswith("__gin__."):
            return
        top = module.split(".")[0]
        if top != "m4":
            if self._allowed is not None and top not in self._allowed:
                raise ConfigError(
                    f"this run's config imports {module}, which is not part of m4: a run folder is "
                    f"data, and its code runs only where you allow it (--allow_module={top})"
                )
            if top not in self.modules:
                self.modules.append(top)
        new = renamed(module)
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{module} is now {new}" if new else str(error)) from error
        except ImportError as error:
            raise ConfigError(f"{module}: {error}") from error
        if new and hasattr(imported, "__path__"):  # a folder took the file's name
            raise ConfigError(f"{module} is now {new}")
        self._imports[statement.format()] = None
        if statement.is_from or statement.alias:
            self._namespace[statement.bound_name()] = imported
        else:
            self._namespace[top] = sys.modules[top]

    def _bind(self, statement: config_parser.BindingStatement, place: str) -> None:
        scopes = tuple(part for part in (statement.scope or "").split("/") if part)
        if not statement.arg_name:
            self._macros["/".join([*scopes, statement.selector])] = (statement.value, place)
            return
        full = f"{statement.selector}.{statement.arg_name}"
        if new := renamed(full):
            raise ConfigError(f"{full} is now {new}")
        target = self._target(statement.selector)
        known = _parameters(target)
        if statement.arg_name not in known:
            raise ConfigError(
                f"{statement.selector} has no parameter {statement.arg_name}"
                f"{near(statement.arg_name, known)}"
            )
        for held in _held(statement.value):
            if isinstance(held, Reference):
                self._references.append(held)
            else:
                self._named_macros.add(held.name)
        key = (scopes, id(target), statement.arg_name)
        self._bindings[key] = Binding(
            scopes, statement.selector, statement.arg_name, target, statement.value, place
        )

    def _target(self, selector: str) -> Any:
        """The class or function that a selector names."""
        if new := renamed(selector):
            raise ConfigError(f"{selector} is now {new}")
        first, *rest = selector.split(".")
        if first not in self._namespace:
            raise ConfigError(
                f"the config imports nothing called {first}{near(first, self._namespace)}"
            )
        found, path = self._namespace[first], first
        for part in rest:
            if not hasattr(found, part):
                name = getattr(found, "__name__", path)
                raise ConfigError(f"{name} has no {part}{near(part, vars(found))}")
            found, path = getattr(found, part), f"{path}.{part}"
        if not callable(found) or inspect.ismodule(found):
            raise ConfigError(f"{selector} is neither a class nor a function")
        module = getattr(found, "__module__", None) or ""
        # Of m4 its settings alone: a function that writes files is none.
        ours = module.split(".")[0] == "m4" and is_checked(found)
        if self._allowed is not None and not ours and module.split(".")[0] not in self._allowed:
            raise ConfigError(f"{selector} is no setting of m4: refused in a saved config")
        self._targets[id(found)] = found
        return found

    # ----------------------------------------------------------------------------------- building

    def experiment(self) -> Experiment:
        """The experiment. ConfigError: a value that cannot be, a name that nothing uses."""
        made = self._make(Reference((), "experiment.Experiment", True), Experiment, (), False, "")
        for key, binding in self._bindings.items():
            if key not in self._reached and not self._refers_to(binding):
                raise ConfigError(
                    f"config: {binding.place}: {binding.name} is set and nothing refers to "
                    f"{'/'.join([*binding.scopes, binding.selector])}"
                )
        for name, (_, place) in self._macros.items():
            if name not in self._used and name not in self._named_macros:
                hint = renamed(name)
                said = f"; m4's name is {hint}" if hint else near(name, self._used)
                raise ConfigError(f"config: {place}: {name} is set and nothing uses it{said}")
        return made

    def _refers_to(self, binding: Binding) -> bool:
        """Whether a reference reaches it or did before another binding replaced that reference: a
        config whose experts are switched off on the command line keeps their settings."""
        scopes = {scope for reference in self._references for scope in reference.scopes}
        targets = [*_PARTS, *(self._target(one.selector) for one in self._references)]
        return {*binding.scopes} <= scopes and any(one is binding.target for one in targets)

    def _make(
        self, reference: Reference, target: Any, scopes: tuple[str, ...], free: bool, place: str
    ) -> Any:
        inner = (*scopes, *reference.scopes)
        key = (inner, id(target))
        self._visited.setdefault(key, target)
        bound = self._bound(target, inner)
        arguments: dict[str, Any] = {}
        if target is Experiment and inner:  # a bilingual baseline, which has none of its own
            arguments["baselines"] = None
            bound.pop("baselines", None)
        annotations, mutable = annotations_of(target), mutable_settings(target)
        for name, binding in bound.items():
            self._reached.add((binding.scopes, id(target), name))
            below = free or name in mutable
            value = self._resolve(binding.value, inner, below, binding)
            try:
                check_value(f"{target.__qualname__}.{name}", value, annotations.get(name, Any))
            except SettingError as error:
                raise self._error(error, binding) from error
            arguments[name] = value
            self._record(target, inner, name, binding.value, below)
        for name, part in self._parts(target, annotations, {*arguments}, inner).items():
            of = Reference((), _canonical(part), True)
            self._made_parts.add((key, name))
            arguments[name] = self._make(of, part, inner, free or name in mutable, place)
        if not reference.evaluated:
            return target if not arguments else _partial(target, arguments)
        for name, parameter in _parameters(target).items():
            needed = parameter.default is parameter.empty and parameter.kind in _NAMED
            if needed and name not in arguments:
                where = f"{place}: " if place else ""
                raise ConfigError(f"config: {where}{_canonical(target)}.{name} must be set")
        try:
            return target(**arguments)
        except SettingError as error:
            raise ConfigError(self.explain(error, inner)) from error

    def _parts(
        self, target: Any, annotations: Mapping[str, Any], given: set[str], scopes: tuple[str, ...]
    ) -> dict[str, Any]:
        """Parts of an experiment that need no line of their own: parameter -> class. Those that
        must be there, or that have bindings."""
        found = {}
        for name, parameter in _parameters(target).items():
            part = next((one for one in _PARTS if _names(annotations.get(name), one)), None)
            if part is None or name in given:
                continue
            needed = parameter.default is parameter.empty
            if needed or self._bound(part, scopes):
                found[name] = part
        return found

    def _bound(self, target: Any, scopes: tuple[str, ...]) -> dict[str, Binding]:
        """parameter -> binding: of the outermost scope first, an inner one replaces it."""
        found = {}
        for depth in range(len(scopes) + 1):
            for (of, identity, name), binding in self._bindings.items():
                if identity == id(target) and of == scopes[:depth]:
                    found[name] = binding
        return found

    def _resolve(self, value: Any, scopes: tuple[str, ...], free: bool, binding: Binding) -> Any:
        if isinstance(value, Macro):
            if value.name == REQUIRED:
                raise ConfigError(f"config: {binding.place}: {binding.name} has no value")
            if value.name not in self._macros:
                raise ConfigError(
                    f"config: {binding.place}: {binding.name} = {value!r}, which is not set"
                    f"{near(value.name, self._macros)}"
                )
            self._used.add(value.name)
            held, place = self._macros[value.name]
            if held == Macro(REQUIRED):
                raise ConfigError(
                    f"config: {place}: {value.name} has no value: --gin.{value.name}=..."
                )
            return self._resolve(held, scopes, free, binding._replace(place=place))
        if isinstance(value, Reference):
            try:
                target = self._target(value.selector)
            except ConfigError as error:
                raise ConfigError(f"config: {binding.place}: {error}") from error
            return self._make(value, target, scopes, free, binding.place)
        if isinstance(value, dict):
            return {
                self._resolve(k, scopes, free, binding): self._resolve(v, scopes, free, binding)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(self._resolve(item, scopes, free, binding) for item in value)
        return value

    def _record(
        self, target: Any, scopes: tuple[str, ...], name: str, value: Any, free: bool
    ) -> None:
        key = "/".join([*scopes, f"{_canonical(target)}.{name}"])
        self.settings[key] = repr(self._plain(value))
        (self.mutable.add if free else self.mutable.discard)(key)

    def _plain(self, value: Any) -> Any:
        """A value with its macros resolved, for text."""
        if isinstance(value, Macro) and value.name in self._macros:
            return self._plain(self._macros[value.name][0])
        if isinstance(value, Reference):
            return value._replace(selector=_canonical(self._target(value.selector)))
        if isinstance(value, dict):
            return {self._plain(k): self._plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._plain(item) for item in value)
        return value

    # ------------------------------------------------------------------------------------- saying

    def explain(self, error: SettingError, scopes: tuple[str, ...] = ()) -> str:
        """A library's SettingError in the config's words: file, line, gin name, macro."""
        owner, _, parameter = error.setting.partition(".")
        parameter, bracket, rest = parameter.partition("[")
        for (at, _), target in self._visited.items():
            if target.__qualname__ == owner and at[: len(scopes)] == scopes:
                binding = self._bound(target, at).get(parameter)
                if binding is not None:
                    return str(self._error(error, binding, bracket + rest))
                name = "/".join([*at, f"{_canonical(target)}.{parameter}{bracket}{rest}"])
                return f"config: {name} = {error.value!r} (not set): must be {error.allowed}"
        return f"config: {error}"

    def _error(self, error: SettingError, binding: Binding, item: str = "") -> ConfigError:
        macro = f" ({binding.value.name})" if isinstance(binding.value, Macro) else ""
        place = binding.place
        if isinstance(binding.value, Macro) and binding.value.name in self._macros:
            place = self._macros[binding.value.name][1]
        return ConfigError(
            f"config: {place}: {binding.name}{item} = {error.value!r}{macro}: "
            f"must be {error.allowed}"
        )

    def bindings(self) -> list[Binding]:
        """All of them, as they stand."""
        return list(self._bindings.values())

    def text(self) -> str:
        """The config as a gin file, without what another binding has made void: what a run keeps as
        config.gin."""
        every = not self._visited  # the experiment was not asked for: nothing is known to be void
        macros = [
            f"{name} = {value!r}"
            for name, (value, _) in self._macros.items()
            if every or name in self._used
        ]
        bindings = [
            f"{one.name} = {one.value!r}"
            for key, one in self._bindings.items()
            if every or key in self._reached
        ]
        head = ["from __gin__ import dynamic_registration", "", *self._imports]
        return "\n".join([*head, "", *macros, "", *bindings, ""])

    def operative_text(self) -> str:
        """Every setting that the experiment uses with its value, defaults included, as a gin file
        by part; what a report shows and a score row names."""
        sections, imports = [], {}
        for key, target in self._visited.items():
            scopes = key[0]
            bound = self._bound(target, scopes)
            lines = []
            for name, parameter in _parameters(target).items():
                if name in bound:
                    value = self._plain(bound[name].value)
                elif (key, name) in self._made_parts:
                    continue
                elif parameter.default is not parameter.empty and _is_literal(parameter.default):
                    value = parameter.default
                else:
                    continue
                full = "/".join([*scopes, f"{_canonical(target)}.{name}"])
                lines.append(f"{full} = {value!r}")
            if lines:
                heading = "/".join([*scopes, _canonical(target)])
                sections.append("\n".join([f"# Parameters for {heading}:", *lines]))
                package, _, module = _module_of(target).rpartition(".")
                imports[f"from {package} import {module}" if package else f"import {module}"] = None
        head = "\n".join(["from __gin__ import dynamic_registration", "", *sorted(imports)])
        return "\n\n".join([head, *sections, ""])


def load(
    files: Iterable[str | Path] = (),
    bindings: Iterable[str] = (),
    *,
    model_dir: str | Path | None = None,
    folders: Sequence[str] = (".",),
    allowed_modules: Collection[str] | None = None,
) -> Config:
    """Reads gin files, then bindings ("NAME = VALUE"), in their order. ConfigError: a mistake.

    model_dir: in place of the config's own. folders: where files are looked for.
    allowed_modules: what a saved config may import besides m4; None: everything.
    """
    config = Config(allowed_modules)
    for name in files:
        config.read_file(str(name), folders)
    for binding in bindings:
        config.read_binding(binding)
    if model_dir is not None:
        config.set_model_dir(str(model_dir))
    return config


def of_experiment(experiment: Experiment) -> Config:
    """The config of an experiment that was made in Python, so that its folder can be read again.

    Raises:
        ConfigError: an object in it is neither a literal nor made of named classes and functions.
    """
    return _Written().config(experiment)


class _Written:
    """Writes objects as bindings: a class or function whose arguments differ gets a scope."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._imports: dict[str, None] = {}

    def config(self, experiment: Experiment) -> Config:
        self._call(Experiment, _fields(experiment), (), "experiment.Experiment")
        text = "\n".join([*self._imports, *(f"{k} = {v}" for k, v in self._lines.items())])
        config = Config()
        config._read(text, lambda line: "the experiment", None)
        return config

    def _call(
        self, target: Any, arguments: Mapping[str, Any], scopes: tuple[str, ...], name: str
    ) -> None:
        package, _, module = _module_of(target).rpartition(".")
        self._imports[f"from {package} import {module}" if package else f"import {module}"] = None
        for parameter, value in arguments.items():
            text = self._value(value, scopes, f"{name}.{parameter}")
            self._lines["/".join([*scopes, f"{name}.{parameter}"])] = text

    def _value(self, value: Any, scopes: tuple[str, ...], place: str) -> str:
        if _is_literal(value):
            return repr(value)
        if isinstance(value, list | tuple):
            items = [self._value(item, scopes, f"{place}_{i}") for i, item in enumerate(value)]
            return f"[{', '.join(items)}]"
        if isinstance(value, Mapping):
            items = [f"{k!r}: {self._value(v, scopes, f'{place}_{k}')}" for k, v in value.items()]
            return "{" + ", ".join(items) + "}"
        if isinstance(value, functools.partial):
            target, arguments, called = value.func, partial_arguments(value), ""
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            target, arguments, called = type(value), _fields(value), "()"
        elif callable(value) and getattr(value, "__qualname__", "<").isidentifier():
            target, arguments, called = value, {}, ""
        else:
            raise ConfigError(f"{place} = {value!r}: no config can name this object")
        name = _canonical(target)
        own = (place.rpartition(".")[2],) if arguments else ()
        self._call(target, arguments, (*scopes, *own), name)
        return f"@{'/'.join([*own, name])}{called}"


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults; of an experiment all, since a
    baseline would inherit what it does not say."""
    if isinstance(value, Experiment):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    found = {}
    for one in dataclasses.fields(value):
        held = getattr(value, one.name)
        default = one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        if one.init and (
            default is dataclasses.MISSING or (held is not default and held != default)
        ):
            found[one.name] = held
    return found


def find_file(name: str, folders: Sequence[str]) -> Path | None:
    """The file of that name: as it stands, else in the first of the folders that has it."""
    paths = (Path(folder) / name for folder in ("", *folders))
    return next((path for path in paths if path.is_file()), None)


def near(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing where no other name is like it."""
    match = difflib.get_close_matches(name, [one for one in known if one != name], n=1)
    return f"; did you mean {match[0]}?" if match else ""


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# Made from their bindings where no line names them.
_PARTS = (Data, Training, Decoding, Baselines, CorpusSpec, ResourceLevels)


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        found = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.kind in _NAMED and not (name in ("parent", "name") and _is_flax(target))
    }


def _is_flax(target: Any) -> bool:
    return isinstance(target, type) and any(base.__module__ == "flax.linen.module" for base in
                                            target.__mro__)  # fmt: skip


def _held(value: Any) -> list[Reference | Macro]:
    """All references and macros in a value."""
    if isinstance(value, Reference | Macro):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(items, str) and isinstance(items, Iterable):
        return [found for item in items for found in _held(item)]
    return []


def _names(annotation: Any, part: type) -> bool:
    """Whether an annotation is the class, also within Annotated and Optional."""
    if annotation is part:
        return True
    return any(_names(one, part) for one in typing.get_args(annotation))


def _partial(target: Any, arguments: Mapping[str, Any]) -> Any:
    made = functools.partial(target, **arguments)
    made.__name__ = target.__name__  # type: ignore[attr-defined]
    return made


def _canonical(target: Any) -> str:
    """The name that configs use, whatever an import is called: "schedules.rsqrt"."""
    return f"{_module_of(target).rpartition('.')[2]}.{target.__qualname__}"


def _module_of(target: Any) -> str:
    ours = target is Experiment or (target in _PARTS and target is not CorpusSpec)
    return "m4.experiment" if ours else target.__module__


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    if isinstance(value, dict):
        return all(map(_is_literal, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str)


def _is_text_macro(held: tuple[Any, str] | None, name: str, value: str) -> bool:
    """Whether a bare word is meant as text: the macro holds text, and this is no quoted text."""
    if held is None or not (isinstance(held[0], str) or name == "MODEL_DIR"):
        return False
    return not re.match(r"""['"%@]|None$""", value)

"""Configs: from gin files and bindings to an `Experiment`. Only the parser of gin is used.

Unlike gin's own, a config is an object: every binding knows its file and line, a reference becomes
a plain object or `functools.partial` that can be sent to another process, and a scope holds for
everything below the reference that names it. A config read from a run's folder is data: it may
name only m4's settings and the modules that the user allows (`allowed_modules`).
"""

import dataclasses
import difflib
import functools
import inspect
import re
import shlex
import sys
import tokenize
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from m4 import experiment as experiments
from m4 import settings
from m4.data.corpus import CorpusSpec
from m4.experiment import Experiment, partial_arguments
from m4.settings import (
    InputError,
    SettingError,
    annotations_of,
    check_value,
    fits,
    given_of,
    given_twice,
    is_checked,
    mutable_of,
)
from m4.storage.files import check_input
from m4.train import initial

REQUIRED = "gin.REQUIRED"
_UNREADABLE = "text needs quotes, parts an @, None a capital"


class ConfigError(InputError):
    """A mistake in a config: its place, the reason and a suggestion, in one line."""


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


def full_name(scopes: Sequence[str], selector: str, parameter: str) -> str:
    """Returns "scope/module.name.parameter"."""
    return "/".join([*scopes, f"{selector}.{parameter}"])


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
        """Name with scopes, "scope/module.name.parameter"."""
        return full_name(self.scopes, self.selector, self.parameter)

    def wrong(self, said: str) -> ConfigError:
        """Returns the mistake, whose line ends in `said`."""
        return ConfigError(f"config: {self.place}: {self.name}{said}")


class _Values(config_parser.ParserDelegate):
    """Receives references and macros from gin's parser; their meaning is decided later."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, selector = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


INITIAL = "INITIAL_CHECKPOINT_PATH"
# Macros of T5X's configs, and m4's names for them.
T5X_MACROS = {
    "EVAL_PERIOD": "experiment.Training.dev_period",
    "EVAL_STEPS": "experiment.Training.dev_pairs",
    "CHECKPOINT_PERIOD": "experiment.Training.checkpoint_period",
    "SAVING_PERIOD": "experiment.Training.checkpoint_period",
    "RANDOM_SEED": "experiment.Training.seed",
    "LABEL_SMOOTHING": "experiment.Training.label_smoothing",
    "Z_LOSS": "experiment.Training.z_loss",
    "LOSS_NORMALIZING_FACTOR": "none (the loss is a mean over target tokens)",
    "USE_CACHED_TASKS": "none (m4 always caches: experiment.Data.corpus)",
}

_NESTED = 8  # how often a binding may be met within its own value, under ever longer scopes
# Parts of an experiment that are made from their bindings even if no line names them.
_NAMES = ("Data", "Training", "Decoding", "Sampling", "Baselines", "ResourceLevels", "BadSteps")
PARTS = (CorpusSpec, *(getattr(experiments, name) for name in _NAMES))


def canonical_name(target: Any) -> str:
    """Returns the name that configs use, "schedules.rsqrt", whatever an import is called."""
    return f"{module_of(target).rpartition('.')[2]}.{target.__qualname__}"


def module_of(target: Any) -> str:
    """Returns the module from which configs import a class or function."""
    ours = target is Experiment or (target in PARTS and target is not CorpusSpec)
    return "m4.experiment" if ours else target.__module__


def _import_line(target: Any) -> str:
    """Returns a config's line that imports the module of a class or function."""
    package, _, module = module_of(target).rpartition(".")
    return f"from {package} import {module}" if package else f"import {module}"


def is_literal(value: Any) -> bool:
    """Returns whether a config's value is plain text, without a reference."""
    return all(one is None or isinstance(one, bool | int | float | str) for one in leaves(value))


class Config:
    """Bindings of gin files and the command line, and the experiment that they describe.

    Attributes:
        modules: Folder of each module outside m4 that the config imports.
        settings: Value of each setting as text, macros resolved, by name ("schedules.rsqrt.peak").
        mutable: Names of the settings that may change in one folder.
    """

    def __init__(self, allowed_modules: Collection[str] | None = None):
        """Makes a config without bindings.

        Args:
            allowed_modules: Modules outside m4 that may be imported, as NAME or NAME=FOLDER, if
                the files may be a stranger's. Defaults to all: the files are the user's.
        """
        named = allowed_modules
        self._allowed = None if named is None else settings.allowed_modules(named)
        self._namespace: dict[str, Any] = {"experiment": experiments, "initial": initial}
        self._imports: dict[str, None] = {}
        self._macros: dict[str, tuple[Any, str]] = {}
        self._bindings: dict[tuple[tuple[str, ...], int, str], Binding] = {}
        self._references: list[Reference] = []
        self._named_macros: set[str] = set()
        self.modules: dict[str, str] = {}
        self._used: set[str] = set()  # macros
        self._reached: set[tuple[tuple[str, ...], int, str]] = set()
        self._visited: dict[tuple[tuple[str, ...], int], Any] = {}
        self._made_parts: set[Any] = set()
        self._within: list[Binding] = []  # bindings being resolved, the innermost last
        self.settings: dict[str, str] = {}
        self.mutable: set[str] = set()

    def read_file(self, name: str, folders: Sequence[str] = (".",), _within: tuple = ()) -> None:
        """Adds a gin file. Raises ConfigError for its first mistake."""
        found = find_file(name, folders)
        if found is None:
            raise ConfigError(f"{name}: no such file in {', '.join(folders)}")
        check_input(found)
        if found.resolve() in _within:
            raise ConfigError(f"{found}: includes itself")
        saved, within = self._allowed is not None, (*_within, found.resolve())
        places = [str(found.parent.resolve())]  # a user's gin file, with modules next to it
        if self._allowed is not None:
            places = [folder for folder in self._allowed.values() if folder]
        if self._allowed != {}:
            sys.path += [one for one in (*places, str(Path.cwd())) if one not in sys.path]
        try:
            text = found.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{found}: cannot be read: {error}") from error

        def include(statement: config_parser.IncludeStatement) -> None:
            if saved:
                raise ConfigError("a saved config includes no other file")
            self.read_file(statement.filename, folders, within)

        self._read(text, lambda line: f"{found} line {line}", include, saved=saved)

    def read_binding(self, text: str) -> None:
        """Adds a binding of the command line; a macro of text needs no quotes."""
        name, equals, value = (part.strip() for part in text.partition("="))
        place = f"'{text}'"
        held, _ = self._macros.get(name, (None, ""))
        of_text = name == INITIAL or isinstance(held, str) or (name == "MODEL_DIR" and held)
        bare = not re.match(r"""[\[(]?\s*['"]|[%@]|None$""", value)
        if equals and "." not in name and of_text and bare:
            self._macros[name] = (value, place)
            return
        if name in T5X_MACROS and name not in self._macros:
            raise ConfigError(f"config: {place}: {name}: m4's name is {T5X_MACROS[name]}")
        try:
            self._read(text, lambda line: place, None)
        except ConfigError as error:
            if not str(error).endswith(_UNREADABLE):
                raise
            typed = self._part(value) or _quoted(value)
            flag = f'--gin.{name}="{typed}"' if "'" in typed else f"--gin.{name}={typed}"
            if re.search(r'["$`\\!]', typed):  # a shell would interpret them
                flag = shlex.quote(f"--gin.{name}={typed}")
            raise ConfigError(f"{error}; in a shell: {flag}") from error

    def _part(self, name: str) -> str | None:
        """Returns how to refer to a part whose name lacks @, or None if it is not a part."""
        for selector in (name, f"{name}.{name.rpartition('.')[2]}"):
            try:
                self._target(selector)
            except ConfigError:
                continue
            return f"@{selector}"
        return None

    def begin_from_macro(self) -> None:
        """Lets T5X's macro INITIAL_CHECKPOINT_PATH name the run that training begins from."""
        if INITIAL in self._macros and INITIAL not in self._named_macros:
            for text in (
                "experiment.Training.initial = @initial.InitialModel()",
                f"initial.InitialModel.run = %{INITIAL}",
            ):
                self._read(text, lambda line: INITIAL, None)

    def set_model_dir(self, folder: str) -> None:
        """Sets MODEL_DIR, through the macro if the config uses one."""
        key = ((), id(Experiment), "model_dir")
        name = "experiment.Experiment.model_dir"
        if key in self._bindings and self._bindings[key].value == Macro("MODEL_DIR"):
            name = "MODEL_DIR"
        self.read_binding(f"{name} = {folder!r}")

    def _read(self, text: str, place_of: Any, include: Any, *, saved: bool = False) -> None:
        line = 1
        try:
            for statement in config_parser.ConfigParser(text, _Values()):
                line = statement.location.line_num
                if isinstance(statement, config_parser.ImportStatement):
                    self._import(statement, saved)
                elif isinstance(statement, config_parser.IncludeStatement):
                    include(statement)
                elif isinstance(statement, config_parser.BindingStatement):
                    value = self._saved(statement.value) if saved else statement.value
                    self._bind(statement, value, place_of(line))
                else:  # the head of a block of bindings
                    self._target(statement.selector)
        except SyntaxError as error:
            said = (error.msg or str(error)).splitlines()[0]
            if "malformed node" in said or "Unable to parse value" in said:
                said = _UNREADABLE
            where = place_of(error.lineno or line)
            raise ConfigError(f"config: {where}: cannot be read: {said}") from error
        except ConfigError as error:
            if str(error).startswith("config: "):
                raise
            raise ConfigError(f"config: {place_of(line)}: {error}") from error
        except tokenize.TokenError as error:
            raise ConfigError(f"config: {place_of(line)}: cannot be read: {error}") from error

    def _saved(self, value: Any) -> Any:
        """Returns a value with every text in it made a `SavedText`."""
        text = settings.SavedText
        return mapped(value, lambda one: text(one, self._allowed) if isinstance(one, str) else one)

    def _import(self, statement: config_parser.ImportStatement, saved: bool) -> None:
        module = self._saved(statement.module) if saved else statement.module
        if module.startswith("__gin__."):
            return
        top = module.split(".")[0]
        try:
            imported = settings.import_module(module)
        except (ModuleNotFoundError, InputError) as error:
            raise ConfigError(str(error)) from error
        except ImportError as error:
            raise ConfigError(f"{module}: {error}") from error
        if top != "m4":
            place = getattr(sys.modules[top], "__file__", None) or ""
            package = hasattr(sys.modules[top], "__path__")
            self.modules[top] = str(Path(place).parents[1 if package else 0]) if place else ""
        self._imports[statement.format()] = None
        if statement.is_from or statement.alias:
            self._namespace[statement.bound_name()] = imported
        else:
            self._namespace[top] = sys.modules[top]

    def _bind(self, statement: config_parser.BindingStatement, value: Any, place: str) -> None:
        scopes = tuple(part for part in (statement.scope or "").split("/") if part)
        if not statement.arg_name:
            self._macros["/".join([*scopes, statement.selector])] = (value, place)
            return
        target = self._target(statement.selector)
        known, name = parameters_of(target), statement.arg_name
        if name not in known:
            raise ConfigError(f"{statement.selector} has no parameter {name}{near(name, known)}")
        if (by := given_of(target, name)) is not None:
            said = f"m4 itself gives it, it is no setting (what decides it: {by})"
            raise ConfigError(f"{statement.selector}.{name}: {said}")
        held = references_in(value)
        self._references += [one for one in held if isinstance(one, Reference)]
        self._named_macros |= {one.name for one in held if isinstance(one, Macro)}
        made = Binding(scopes, statement.selector, name, target, value, place)
        self._bindings[scopes, id(target), name] = made

    def _target(self, selector: str) -> Any:
        """Returns the class or function that a selector names."""
        first, *rest = selector.split(".")
        if first not in self._namespace:
            hint = _import_of(first) or near(first, self._namespace)
            raise ConfigError(f"the config imports nothing called {first}{hint}")
        found, path = self._namespace[first], first
        for part in rest:
            if not hasattr(found, part):
                name = getattr(found, "__name__", path)
                raise ConfigError(f"{name} has no {part}{near(part, vars(found))}")
            found, path = getattr(found, part), f"{path}.{part}"
        if not callable(found) or inspect.ismodule(found):
            inside = getattr(found, selector.rpartition(".")[2], None)
            hint = f"; did you mean @{selector}.{path.rpartition('.')[2]}?" if inside else ""
            raise ConfigError(f"{selector} is neither a class nor a function{hint}")
        module = getattr(found, "__module__", None) or ""
        # Only settings of m4 are allowed, not, say, a function that writes files.
        ours = module.split(".")[0] == "m4" and is_checked(found)
        if self._allowed is not None and not ours and module.split(".")[0] not in self._allowed:
            raise ConfigError(f"{selector} is no setting of m4: refused in a saved config")
        return found

    def experiment(self) -> Experiment:
        self._within = []
        made = self._make(Reference((), "experiment.Experiment", True), Experiment, (), False, "")
        for key, binding in self._bindings.items():
            if key not in self._reached:
                self._check_unused(binding)
        for name, (_, place) in self._macros.items():
            if name not in self._used and name not in self._named_macros:
                hint = T5X_MACROS.get(name)
                said = f"; m4's name is {hint}" if hint else near(name, self._used)
                raise ConfigError(f"config: {place}: {name} is set and nothing uses it{said}")
        return made

    def _check_unused(self, binding: Binding) -> None:
        # A reference leads to it, or did before another one replaced it.
        scopes = {scope for reference in self._references for scope in reference.scopes}
        targets = [*PARTS, *(self._target(one.selector) for one in self._references)]
        reached = any(one is binding.target for one in targets)
        if not ({*binding.scopes} <= scopes and reached):
            of = "/".join([*binding.scopes, binding.selector])
            raise binding.wrong(f" is set and nothing refers to {of}")
        value = self._plain(binding.value)
        if not references_in(value):
            self._check(binding, value)

    def _check(self, binding: Binding, value: Any) -> None:
        """Raises ConfigError for a value that the parameter of the binding cannot have."""
        target, name = binding.target, binding.parameter
        annotation = annotations_of(target).get(name, Any)
        if twice := given_twice(value, annotation):
            for one in self._bindings.values():
                if one.target is value.func and one.parameter == twice:
                    raise one.wrong(f" = {one.value!r}: m4 itself gives it, it is no setting")
        try:
            check_value(f"{target.__qualname__}.{name}", value, annotation)
        except SettingError as error:
            raise self._error(error, binding) from error

    def _make(
        self, reference: Reference, target: Any, scopes: tuple[str, ...], mutable: bool, place: str
    ) -> Any:
        inner = (*scopes, *reference.scopes)
        key = (inner, id(target))
        self._visited.setdefault(key, target)
        bound = self._bound(target, inner)
        arguments: dict[str, Any] = {}
        if target is Experiment and inner:  # a bilingual baseline, which has no baselines
            arguments["baselines"] = None
            bound.pop("baselines", None)
        marked = mutable_of(target)
        for name, binding in bound.items():
            self._reached.add((binding.scopes, id(target), name))
            below = mutable or name in marked
            self._within.append(binding)
            value = self._resolve(binding.value, inner, below, binding)
            self._within.pop()
            self._check(binding, value)
            arguments[name] = value
            setting = full_name(inner, canonical_name(target), name)
            if not below:
                self.mutable.discard(setting)
            elif setting not in self.settings:
                self.mutable.add(setting)
            self.settings[setting] = repr(self._plain(binding.value))
        for name, (part, needed) in _parts_of(target).items():
            if name not in arguments and (needed or self._bound(part, inner)):
                of = Reference((), canonical_name(part), True)
                self._made_parts.add((key, name))
                below = mutable or name in marked
                arguments[name] = self._make(of, part, inner, below, place)
        if not reference.evaluated:
            return target if not arguments else _partial(target, arguments)
        for name, parameter in parameters_of(target).items():
            needed = parameter.default is parameter.empty
            if needed and name not in arguments:
                where = f"{place}: " if place else ""
                if given_of(target, name) is not None:
                    said = f"m4 makes it, with its {name}: write it without brackets"
                    raise ConfigError(f"config: {where}@{canonical_name(target)}(): {said}")
                raise ConfigError(f"config: {where}{canonical_name(target)}.{name} must be set")
        try:
            return target(**arguments)
        except SettingError as error:
            raise ConfigError(self.explain(error, inner)) from error

    def _bound(self, target: Any, scopes: tuple[str, ...]) -> dict[str, Binding]:
        """Returns the binding of each parameter; an inner scope overrides an outer one."""
        # Within the scopes a/b, bindings without a scope and those of a, b and a/b count.
        depths = range(len(scopes) + 1)
        places = [*(scopes[:depth] for depth in depths), *(scopes[-depth:] for depth in depths[1:])]
        found = {}
        for place in places:
            for (of, identity, name), binding in self._bindings.items():
                if identity == id(target) and of == place:
                    found[name] = binding
        return found

    def _resolve(self, value: Any, scopes: tuple[str, ...], mutable: bool, binding: Binding) -> Any:
        """Returns a value with its macros and references resolved to values and objects."""

        def leaf(one: Any) -> Any:
            if isinstance(one, Macro):
                if one.name == REQUIRED:
                    raise binding.wrong(" has no value")
                if one.name not in self._macros:
                    hint = near(one.name, self._macros)
                    raise binding.wrong(f" = {one!r}, which is not set{hint}")
                self._used.add(one.name)
                held, place = self._macros[one.name]
                if held == Macro(REQUIRED):
                    said = f"{one.name} has no value: --gin.{one.name}=..."
                    raise ConfigError(f"config: {place}: {said}")
                return self._resolve(held, scopes, mutable, binding._replace(place=place))
            if not isinstance(one, Reference):
                return one
            try:
                target = self._target(one.selector)
            except ConfigError as error:
                raise ConfigError(f"config: {binding.place}: {error}") from error
            if self._within.count(binding) > _NESTED:
                raise binding.wrong(f" = {one!r}: refers to itself")
            return self._make(one, target, scopes, mutable, binding.place)

        return mapped(value, leaf)

    def _plain(self, value: Any) -> Any:
        """Returns a value with its macros resolved and its references under canonical names."""

        def leaf(one: Any) -> Any:
            if isinstance(one, Macro) and one.name in self._macros:
                return self._plain(self._macros[one.name][0])
            if isinstance(one, Reference):
                return one._replace(selector=canonical_name(self._target(one.selector)))
            return one

        return mapped(value, leaf)

    def explain(self, error: SettingError, scopes: tuple[str, ...] = ()) -> str:
        """Returns a library's SettingError in terms of the config: file, line, gin name, macro."""
        owner, _, parameter = error.setting.partition(".")
        parameter, bracket, rest = parameter.partition("[")
        for (at, _), target in self._visited.items():
            if target.__qualname__ == owner and at[: len(scopes)] == scopes:
                binding = self._bound(target, at).get(parameter)
                if binding is not None:
                    return str(self._error(error, binding, bracket + rest))
                name = full_name(at, canonical_name(target), f"{parameter}{bracket}{rest}")
                return f"config: {name} = {error.value!r} (not set): must be {error.allowed}"
        return f"config: {error}"

    def _error(self, error: SettingError, binding: Binding, item: str = "") -> ConfigError:
        macro = f" ({binding.value.name})" if isinstance(binding.value, Macro) else ""
        place = binding.place
        if isinstance(binding.value, Macro) and binding.value.name in self._macros:
            place = self._macros[binding.value.name][1]
        value, plain, here = error.value, self._plain(binding.value), ""
        if not item and any(isinstance(one, Reference) for one in references_in(plain)):
            value, here = plain, self._fitting(binding)
        said = f"{binding.name}{item} = {value!r}{macro}"
        where = "" if place == f"'{said}'" else f"{place}: "  # a flag names itself
        return ConfigError(f"config: {where}{said}: must be {error.allowed}{here}")

    def _fitting(self, binding: Binding) -> str:
        """Lists references that fit a setting, from the modules that the config imports."""
        annotation = annotations_of(binding.target).get(binding.parameter, Any)
        modules = filter(inspect.ismodule, self._namespace.values())
        named = [(one, module.__name__) for module in modules for one in vars(module).values()]
        parts = [one for one, home in named if is_checked(one) and one.__module__ == home]
        found = [f"@{canonical_name(one)}{'' if fits(one, annotation) else '()'}"
                 for one in parts if fits(one, annotation) or _names(annotation, one)]  # fmt: skip
        return f", here {' or '.join(dict.fromkeys(found))}" if found else ""

    def bindings(self) -> list[Binding]:
        """Returns all bindings as written."""
        return list(self._bindings.values())

    def text(self) -> str:
        """Returns the config as a gin file, which a run keeps as config.gin.

        Bindings without effect, which another one has replaced, are left out.
        """
        every = not self._visited  # not made yet: which have no effect is unknown
        macros = [f"{name} = {value!r}" for name, (value, _) in self._macros.items()
                  if every or name in self._used]  # fmt: skip
        bindings = [f"{one.name} = {one.value!r}" for key, one in self._bindings.items()
                    if every or key in self._reached]  # fmt: skip
        head = ["from __gin__ import dynamic_registration", "", *self._imports]
        return "\n".join([*head, "", *macros, "", *bindings, ""])

    def operative_text(self) -> str:
        """Returns every setting that the experiment uses, defaults included, as a gin file."""
        sections, imports = [], set[str]()
        for key, target in self._visited.items():
            scopes, selector, lines = key[0], canonical_name(target), []
            bound = self._bound(target, scopes)
            for name, parameter in parameters_of(target).items():
                if given_of(target, name) is not None:
                    continue
                value = parameter.default
                if name in bound:
                    value = self._plain(bound[name].value)
                elif (key, name) in self._made_parts or not is_literal(value):
                    continue  # also if there is no default
                lines.append(f"{full_name(scopes, selector, name)} = {value!r}")
            if lines:
                heading = "/".join([*scopes, selector])
                sections.append("\n".join([f"# Parameters for {heading}:", *lines]))
            imports.add(_import_line(target))  # what has no parameters is named by reference
        head = "\n".join(["from __gin__ import dynamic_registration", "", *sorted(imports)])
        return "\n\n".join([head, *sections, ""])


def load(
    files: Iterable[str | Path] = (), bindings: Iterable[str] = (), *,
    model_dir: str | Path | None = None, folders: Sequence[str] = (".",),
    allowed_modules: Collection[str] | None = None,
) -> Config:  # fmt: skip
    """Returns the config of gin files and then bindings, in their order.

    Args:
        bindings: Further bindings, "NAME = VALUE".
        model_dir: MODEL_DIR. Defaults to the config's own.
        allowed_modules: Modules that a saved config may import outside m4. Defaults to all.
    """
    config = Config(allowed_modules)
    for name in files:
        config.read_file(str(name), folders)
    for binding in bindings:
        config.read_binding(binding)
    if model_dir is not None:
        config.set_model_dir(str(model_dir))
    config.begin_from_macro()
    return config


@functools.cache
def _parts_of(target: Any) -> Mapping[str, tuple[type, bool]]:
    """Returns the class of each parameter that is a part, and whether it lacks a default."""
    annotations, found = annotations_of(target), {}
    for name, parameter in parameters_of(target).items():
        part = next((one for one in PARTS if _names(annotations.get(name), one)), None)
        if part is not None:
            found[name] = part, parameter.default is parameter.empty
    return found


def _names(annotation: Any, part: type) -> bool:
    """Returns whether an annotation is the class, also within Annotated and Optional."""
    return annotation is part or any(_names(one, part) for one in typing.get_args(annotation))


def _partial(target: Any, arguments: Mapping[str, Any]) -> Any:
    made = functools.partial(target, **arguments)
    made.__name__ = target.__name__  # type: ignore[attr-defined]
    return made


def of_experiment(experiment: Experiment) -> Config:
    """Returns the config of an experiment made in Python, so that its run can be opened again."""
    written, config = _Written(experiment), Config()
    config._read(written.text(), lambda line: "the experiment", None)
    return config


class _Written:
    """Writes objects as bindings; one that is used with different arguments gets a scope."""

    def __init__(self, experiment: Experiment) -> None:
        self._lines: dict[str, str] = {}
        self._imports: dict[str, None] = {}
        self._call(Experiment, _fields(experiment), (), "experiment.Experiment")

    def text(self) -> str:
        return "\n".join([*self._imports, *(f"{k} = {v}" for k, v in self._lines.items())])

    def _call(
        self, target: Any, arguments: Mapping[str, Any], scopes: tuple[str, ...], name: str
    ) -> None:
        self._imports[_import_line(target)] = None
        for parameter, value in arguments.items():
            text = self._value(value, scopes, f"{name}.{parameter}")
            self._lines[full_name(scopes, name, parameter)] = text

    def _value(self, value: Any, scopes: tuple[str, ...], place: str) -> str:
        if is_literal(value):
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
        name = canonical_name(target)
        own = (place.rpartition(".")[2],) if arguments else ()
        self._call(target, arguments, (*scopes, *own), name)
        return f"@{'/'.join([*own, name])}{called}"


def _fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults; all of an experiment."""
    if isinstance(value, Experiment):  # a baseline would inherit those that it does not name
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
    """Returns the file of this name, here or in the first of the folders that has it."""
    paths = (Path(folder) / name for folder in ("", *folders))
    return next((path for path in paths if path.is_file()), None)


def near(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?", or "" if no known name is close."""
    names = [one for one in known if one != name]
    match = [one for one in names if f"_{name}_" in f"_{one}_"][:3]
    match = match or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {' or '.join(match)}?" if match else ""


def _import_of(name: str) -> str:
    """Returns "; add: from m4.... import ..." if exactly one part of m4 has the name."""
    package = Path(__file__).parent
    rooms = [package / room for room in ("data", "model", "train", "eval", "parallel")]
    found = [path.parent for room in rooms for path in room.rglob(f"{name}.py")]
    if len(found) != 1:
        return ""
    home = ".".join(found[0].relative_to(package.parent).parts)
    return f"; add: from {home} import {name}"


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a class or function that a config may set."""
    flax = any(base.__module__ == "flax.linen.module" for base in getattr(target, "__mro__", ()))
    try:
        found = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    hidden = ("parent", "name") if flax else ()
    return {name: p for name, p in found.items() if p.kind in _NAMED and name not in hidden}


def _quoted(value: str) -> str:
    """Returns a value with quotes around its bare words; in a list, around each."""
    if value.capitalize() in ("None", "True", "False"):
        return value.capitalize()
    if not re.match(r"[\[({]", value):
        return repr(value.strip("'\""))
    word = r"""'[^']*'|"[^"]*"|[@%]?[A-Za-z][\w./:-]*"""
    kept = re.compile(r"""['"@%]|(True|False|None)$""")
    return re.sub(word, lambda found: found[0] if kept.match(found[0]) else repr(found[0]), value)


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Applies `leaf` to everything in the lists, tuples and dictionaries of a value."""
    if isinstance(value, dict):
        return {mapped(k, leaf): mapped(v, leaf) for k, v in value.items()}
    if type(value) in (list, tuple):  # not a reference or macro
        return type(value)(mapped(one, leaf) for one in value)
    return leaf(value)


def leaves(value: Any) -> list[Any]:
    """Yields everything in the lists, tuples and dictionaries of a value, without these."""
    found: list[Any] = []
    mapped(value, found.append)
    return found


def references_in(value: Any) -> list[Reference | Macro]:
    """Returns all references and macros in a value."""
    return [one for one in leaves(value) if isinstance(one, Reference | Macro)]

"""The bindings of gin files and the command line, each with its file and line.

Of gin, only the parser is used.
"""

import difflib
import inspect
import re
import shlex
import sys
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from m4 import experiment as experiment_module
from m4 import settings
from m4.settings import InputError, is_checked
from m4.storage.files import check_input
from m4.train import initial

REQUIRED = "gin.REQUIRED"


_UNQUOTED = "the value cannot be read; text needs quotes"


class ConfigError(InputError):
    """A mistake in a config: its place, the reason and what may have been meant, in one line."""


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
        """Name with scopes, "scope/module.name.parameter"."""
        return "/".join([*self.scopes, f"{self.selector}.{self.parameter}"])


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


class Bindings:
    """Bindings of gin files and the command line.

    Attributes:
        modules: Folder of each module outside m4 that the config imports.
    """

    def __init__(self, allowed_modules: Collection[str] | None = None):
        """Has no bindings yet.

        Args:
            allowed_modules: Modules allowed outside m4, as NAME or NAME=FOLDER, where the files are
                of a run and may be a stranger's. Defaults to all: the files are the user's own.
        """
        named = allowed_modules
        self._allowed = None if named is None else settings.allowed_modules(named)
        self._namespace: dict[str, Any] = {"experiment": experiment_module, "initial": initial}
        self._imports: dict[str, None] = {}
        self._macros: dict[str, tuple[Any, str]] = {}
        self._bindings: dict[tuple[tuple[str, ...], int, str], Binding] = {}
        self._references: list[Reference] = []
        self._named_macros: set[str] = set()
        self.modules: dict[str, str] = {}

    def read_file(self, name: str, folders: Sequence[str] = (".",), _within: tuple = ()) -> None:
        """Adds a gin file. Raises ConfigError for its first mistake, with file and line."""
        found = find_file(name, folders)
        if found is None:
            raise ConfigError(f"{name}: no such file in {', '.join(folders)}")
        check_input(found)
        if found.resolve() in _within:
            raise ConfigError(f"{found}: includes itself")
        places = [str(found.parent.resolve())]  # a user's own gin file, with modules next to it
        if self._allowed is not None:
            places = [folder for folder in self._allowed.values() if folder]
        if self._allowed is None or self._allowed:
            sys.path += [one for one in (*places, str(Path.cwd())) if one not in sys.path]
        within = (*_within, found.resolve())
        try:
            text = found.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{found}: cannot be read: {error}") from error

        def include(statement: config_parser.IncludeStatement) -> None:
            if self._allowed is not None:
                raise ConfigError("a saved config includes no other file")
            self.read_file(statement.filename, folders, within)

        saved = self._allowed is not None
        self._read(text, lambda line: f"{found} line {line}", include, saved=saved)

    def read_binding(self, text: str) -> None:
        """Adds a binding of the command line; a macro of text needs no quotes."""
        name, equals, value = (part.strip() for part in text.partition("="))
        place = f"'{text}'"
        if equals and "." not in name and _is_text_macro(self._macros.get(name), name, value):
            self._macros[name] = (value, place)
            return
        if name in T5X_MACROS and name not in self._macros:
            raise ConfigError(f"config: {place}: {name}: m4's name is {T5X_MACROS[name]}")
        try:
            self._read(text, lambda line: place, None)
        except ConfigError as error:
            if not str(error).endswith(_UNQUOTED):
                raise
            if (part := self._part(value)) is not None:
                said = str(error).replace(_UNQUOTED, f"{value} is a part, named with @")
                raise ConfigError(f"{said}: --gin.{name}={part}") from error
            if (constant := value.capitalize()) in ("None", "True", "False"):
                said = f"{error}, {constant} a capital: --gin.{name}={constant}"
                raise ConfigError(said) from error
            quoted = _quoted(value)
            flag = f'--gin.{name}="{quoted}"'
            if re.search(r'["$`\\!]', quoted):  # the shell would look at them
                flag = shlex.quote(f"--gin.{name}={quoted}")
            raise ConfigError(f"{error}; in a shell: {flag}") from error

    def _part(self, name: str) -> str | None:
        """Returns how to refer to a part whose name has no @, or None where it is no part."""
        for selector in (name, f"{name}.{name.rpartition('.')[2]}"):
            try:
                self._target(selector)
            except ConfigError:
                continue
            return f"@{selector}"
        return None

    def begin_from_macro(self) -> None:
        """Makes T5X's macro INITIAL_CHECKPOINT_PATH the run that training begins from."""
        if INITIAL in self._macros and INITIAL not in self._named_macros:
            for text in (
                "experiment.Training.initial = @initial.InitialModel()",
                f"initial.InitialModel.run = %{INITIAL}",
            ):
                self._read(text, lambda line: INITIAL, None)

    def set_model_dir(self, folder: str) -> None:
        """Sets another MODEL_DIR, by the macro where the config uses one."""
        key = ((), id(experiment_module.Experiment), "model_dir")
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
                else:  # the head of a block, whose bindings follow
                    self._target(statement.selector)
        except SyntaxError as error:
            said = (error.msg or str(error)).splitlines()[0]
            if "malformed node" in said or "Unable to parse value" in said:
                said = _UNQUOTED
            else:
                said = f"cannot be read: {said}"
            raise ConfigError(f"config: {place_of(error.lineno or line)}: {said}") from error
        except ConfigError as error:
            if str(error).startswith("config: "):
                raise
            raise ConfigError(f"config: {place_of(line)}: {error}") from error
        except tokenize.TokenError as error:
            raise ConfigError(f"config: {place_of(line)}: cannot be read: {error}") from error

    def _saved(self, value: Any) -> Any:
        """Returns a value with every text in it as a `SavedText`."""
        if isinstance(value, str):
            return settings.SavedText(value, self._allowed)
        if isinstance(value, dict):
            return {self._saved(k): self._saved(v) for k, v in value.items()}
        if type(value) in (list, tuple):  # not a reference or macro
            return type(value)(map(self._saved, value))
        return value

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
        known = parameters_of(target)
        if statement.arg_name not in known:
            raise ConfigError(
                f"{statement.selector} has no parameter {statement.arg_name}"
                f"{near(statement.arg_name, known)}"
            )
        if (by := settings.given_of(target, statement.arg_name)) is not None:
            raise ConfigError(
                f"{statement.selector}.{statement.arg_name}: m4 itself gives it, it is no setting "
                f"(what decides it: {by})"
            )
        for held in references_in(value):
            if isinstance(held, Reference):
                self._references.append(held)
            else:
                self._named_macros.add(held.name)
        key = (scopes, id(target), statement.arg_name)
        named = (scopes, statement.selector, statement.arg_name)
        self._bindings[key] = Binding(*named, target, value, place)

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
        # Only settings of m4: a function that writes files is none.
        ours = module.split(".")[0] == "m4" and is_checked(found)
        if self._allowed is not None and not ours and module.split(".")[0] not in self._allowed:
            raise ConfigError(f"{selector} is no setting of m4: refused in a saved config")
        return found


def find_file(name: str, folders: Sequence[str]) -> Path | None:
    """Returns a file as its name stands, or in the first of the folders that has it."""
    paths = (Path(folder) / name for folder in ("", *folders))
    return next((path for path in paths if path.is_file()), None)


def near(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?", or nothing where no other name is like it."""
    names = [one for one in known if one != name]
    match = [one for one in names if f"_{name}_" in f"_{one}_"][:3]
    match = match or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {' or '.join(match)}?" if match else ""


def _import_of(name: str) -> str:
    """Returns "; add: from m4.... import ...", where exactly one part of m4 has the name."""
    package = Path(__file__).parents[1]
    rooms = [package / room for room in ("data", "model", "train", "eval", "parallel")]
    found = [path.parent for room in rooms for path in room.rglob(f"{name}.py")]
    if len(found) != 1:
        return ""
    home = ".".join(found[0].relative_to(package.parent).parts)
    return f"; add: from {home} import {name}"


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a class or function that a config may set."""
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


def _quoted(value: str) -> str:
    """Returns a value with quotes around its bare words: of a list around each, else around all."""
    if not re.match(r"[\[({]", value):
        return repr(value.strip("'\""))
    word = r"""'[^']*'|"[^"]*"|[@%]?[A-Za-z][\w./:-]*"""
    kept = re.compile(r"""['"@%]|(True|False|None)$""")
    return re.sub(word, lambda found: found[0] if kept.match(found[0]) else repr(found[0]), value)


def references_in(value: Any) -> list[Reference | Macro]:
    """Returns all references and macros in a value."""
    if isinstance(value, Reference | Macro):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(items, str) and isinstance(items, Iterable):
        return [found for item in items for found in references_in(item)]
    return []


def _is_text_macro(held: tuple[Any, str] | None, name: str, value: str) -> bool:
    """Returns whether a bare word is text: the macro holds text, and this has no quotes."""
    known = held is not None and (isinstance(held[0], str) or name == "MODEL_DIR")
    return (known or name == INITIAL) and not re.match(r"""[\[(]?\s*['"]|[%@]|None$""", value)

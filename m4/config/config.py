"""The experiment that bindings describe, which of its settings may change, and its text."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.config.bindings import (
    REQUIRED,
    T5X_MACROS,
    Binding,
    Bindings,
    ConfigError,
    Macro,
    Reference,
    near,
    parameters_of,
    references_in,
)
from m4.data.corpus import CorpusSpec
from m4.experiment import (
    BadSteps,
    Baselines,
    Data,
    Decoding,
    Experiment,
    ResourceLevels,
    Sampling,
    Training,
    partial_arguments,
)
from m4.references import given_twice
from m4.settings import (
    SettingError,
    annotations_of,
    check_value,
    fits,
    given_of,
    is_checked,
    mutable_of,
)

_NESTED = 8  # times that a binding may be met within its own value, under ever longer scopes
# Parts of an experiment, made from their bindings where no line names them.
PARTS = (Data, Training, Decoding, Sampling, Baselines, CorpusSpec, ResourceLevels, BadSteps)


def canonical_name(target: Any) -> str:
    """Returns the name that configs use, whatever an import is called: "schedules.rsqrt"."""
    return f"{module_of(target).rpartition('.')[2]}.{target.__qualname__}"


def module_of(target: Any) -> str:
    """Returns the module from which configs import a class or function."""
    ours = target is Experiment or (target in PARTS and target is not CorpusSpec)
    return "m4.experiment" if ours else target.__module__


def is_literal(value: Any) -> bool:
    """Returns whether a value is text in a config, without a reference."""
    if isinstance(value, list | tuple):
        return all(map(is_literal, value))
    if isinstance(value, dict):
        return all(map(is_literal, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str)


class Config(Bindings):
    """The bindings of gin files and the command line, and the experiment that they describe.

    Attributes:
        settings: Value of each setting as text, macros resolved, by name ("schedules.rsqrt.peak").
        mutable: Names of the settings that may change in one folder.
    """

    def __init__(self, allowed_modules: Collection[str] | None = None):
        super().__init__(allowed_modules)
        self._used: set[str] = set()  # macros
        self._reached: set[tuple[tuple[str, ...], int, str]] = set()
        self._visited: dict[tuple[tuple[str, ...], int], Any] = {}
        self._made_parts: set[Any] = set()
        self._within: list[Binding] = []  # whose values are being made, the innermost one last
        self.settings: dict[str, str] = {}
        self.mutable: set[str] = set()

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
        if not self._refers_to(binding):
            raise ConfigError(
                f"config: {binding.place}: {binding.name} is set and nothing refers to "
                f"{'/'.join([*binding.scopes, binding.selector])}"
            )
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
                    said = f"{one.name} = {one.value!r}: m4 itself gives it, it is no setting"
                    raise ConfigError(f"config: {one.place}: {said}")
        try:
            check_value(f"{target.__qualname__}.{name}", value, annotation)
        except SettingError as error:
            raise self._error(error, binding) from error

    def _refers_to(self, binding: Binding) -> bool:
        """Returns whether a reference reaches a binding, or did before another one replaced it."""
        scopes = {scope for reference in self._references for scope in reference.scopes}
        targets = [*PARTS, *(self._target(one.selector) for one in self._references)]
        return {*binding.scopes} <= scopes and any(one is binding.target for one in targets)

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
            self._record(target, inner, name, binding.value, below)
        for name, part in self._parts(target, {*arguments}, inner):
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

    def _parts(
        self, target: Any, given: set[str], scopes: tuple[str, ...]
    ) -> Iterator[tuple[str, Any]]:
        """Yields (parameter, class) of parts that must be there, or that have bindings."""
        for name, (part, needed) in _parts_of(target).items():
            if name not in given and (needed or self._bound(part, scopes)):
                yield name, part

    def _bound(self, target: Any, scopes: tuple[str, ...]) -> dict[str, Binding]:
        """Returns the binding of each parameter; that of an inner scope replaces an outer one."""
        # Of the scopes a/b they are those of nothing, of a, of b and of a/b.
        depths = range(len(scopes) + 1)
        places = [*(scopes[:depth] for depth in depths), *(scopes[-depth:] for depth in depths[1:])]
        found = {}
        for place in places:
            for (of, identity, name), binding in self._bindings.items():
                if identity == id(target) and of == place:
                    found[name] = binding
        return found

    def _resolve(self, value: Any, scopes: tuple[str, ...], mutable: bool, binding: Binding) -> Any:
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
            return self._resolve(held, scopes, mutable, binding._replace(place=place))
        if isinstance(value, Reference):
            try:
                target = self._target(value.selector)
            except ConfigError as error:
                raise ConfigError(f"config: {binding.place}: {error}") from error
            if self._within.count(binding) > _NESTED:
                said = f"{binding.name} = {value!r}: refers to itself"
                raise ConfigError(f"config: {binding.place}: {said}")
            return self._make(value, target, scopes, mutable, binding.place)
        resolve = functools.partial(self._resolve, scopes=scopes, mutable=mutable, binding=binding)
        if isinstance(value, dict):
            return {resolve(k): resolve(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(resolve, value))
        return value

    def _record(
        self, target: Any, scopes: tuple[str, ...], name: str, value: Any, mutable: bool
    ) -> None:
        key = "/".join([*scopes, f"{canonical_name(target)}.{name}"])
        if not mutable:
            self.mutable.discard(key)
        elif key not in self.settings:
            self.mutable.add(key)
        self.settings[key] = repr(self._plain(value))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Macro) and value.name in self._macros:
            return self._plain(self._macros[value.name][0])
        if isinstance(value, Reference):
            return value._replace(selector=canonical_name(self._target(value.selector)))
        if isinstance(value, dict):
            return {self._plain(k): self._plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._plain(item) for item in value)
        return value

    # ------------------------------------------------------------------------------------- saying

    def explain(self, error: SettingError, scopes: tuple[str, ...] = ()) -> str:
        """Says a library's SettingError as the config has it: file, line, gin name, macro."""
        owner, _, parameter = error.setting.partition(".")
        parameter, bracket, rest = parameter.partition("[")
        for (at, _), target in self._visited.items():
            if target.__qualname__ == owner and at[: len(scopes)] == scopes:
                binding = self._bound(target, at).get(parameter)
                if binding is not None:
                    return str(self._error(error, binding, bracket + rest))
                name = "/".join([*at, f"{canonical_name(target)}.{parameter}{bracket}{rest}"])
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
        where = "" if place == f"'{said}'" else f"{place}: "  # of the command line: it says itself
        return ConfigError(f"config: {where}{said}: must be {error.allowed}{here}")

    def _fitting(self, binding: Binding) -> str:
        """Names references that a setting may have, from the modules that the config imports."""
        annotation = annotations_of(binding.target).get(binding.parameter, Any)
        found = []
        for module in filter(inspect.ismodule, self._namespace.values()):
            for one in vars(module).values():
                if not is_checked(one) or one.__module__ != module.__name__:
                    continue
                if fits(one, annotation):
                    found.append(f"@{canonical_name(one)}")
                elif _names(annotation, one):
                    found.append(f"@{canonical_name(one)}()")
        default = parameters_of(binding.target)[binding.parameter].default
        if inspect.isroutine(default):
            found.append(f"@{canonical_name(default)}")
        return f", here {' or '.join(dict.fromkeys(found))}" if found else ""

    def bindings(self) -> list[Binding]:
        """Returns all bindings, as they stand."""
        return list(self._bindings.values())

    def text(self) -> str:
        """Returns the config as a gin file, which a run keeps as config.gin.

        Bindings that another one has made void are left out.
        """
        every = not self._visited  # the experiment was not asked for: nothing is known to be void
        macros = [f"{name} = {value!r}" for name, (value, _) in self._macros.items()
                  if every or name in self._used]  # fmt: skip
        bindings = [f"{one.name} = {one.value!r}" for key, one in self._bindings.items()
                    if every or key in self._reached]  # fmt: skip
        head = ["from __gin__ import dynamic_registration", "", *self._imports]
        return "\n".join([*head, "", *macros, "", *bindings, ""])

    def operative_text(self) -> str:
        """Returns every setting that the experiment uses, defaults included, as a gin file."""
        sections, imports = [], {}
        for key, target in self._visited.items():
            scopes = key[0]
            bound = self._bound(target, scopes)
            lines = []
            for name, parameter in parameters_of(target).items():
                if name in bound:
                    value = self._plain(bound[name].value)
                elif (key, name) in self._made_parts:
                    continue
                elif parameter.default is not parameter.empty and is_literal(parameter.default):
                    value = parameter.default
                else:
                    continue
                if given_of(target, name) is not None:
                    continue
                full = "/".join([*scopes, f"{canonical_name(target)}.{name}"])
                lines.append(f"{full} = {value!r}")
            if lines:
                heading = "/".join([*scopes, canonical_name(target)])
                sections.append("\n".join([f"# Parameters for {heading}:", *lines]))
                package, _, module = module_of(target).rpartition(".")
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
    """Reads gin files, then bindings, in their order.

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
    """Returns the class of each parameter that is a part, and whether it has no default."""
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
    """Returns the config of an experiment made in Python, so that its folder can be read again."""
    written, config = _Written(experiment), Config()
    config._read(written.text(), lambda line: "the experiment", None)
    return config


class _Written:
    """Writes objects as bindings: a class or function whose arguments differ gets a scope."""

    def __init__(self, experiment: Experiment) -> None:
        self._lines: dict[str, str] = {}
        self._imports: dict[str, None] = {}
        self._call(Experiment, _fields(experiment), (), "experiment.Experiment")

    def text(self) -> str:
        return "\n".join([*self._imports, *(f"{k} = {v}" for k, v in self._lines.items())])

    def _call(
        self, target: Any, arguments: Mapping[str, Any], scopes: tuple[str, ...], name: str
    ) -> None:
        package, _, module = module_of(target).rpartition(".")
        self._imports[f"from {package} import {module}" if package else f"import {module}"] = None
        for parameter, value in arguments.items():
            text = self._value(value, scopes, f"{name}.{parameter}")
            self._lines["/".join([*scopes, f"{name}.{parameter}"])] = text

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
    """Returns the fields of a dataclass that are not at their defaults, of an experiment all."""
    if isinstance(value, Experiment):  # a baseline would inherit those that it does not say
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

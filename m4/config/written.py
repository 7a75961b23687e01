"""The config of an experiment that was made in Python."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from m4.config.bindings import ConfigError
from m4.config.config import Config, canonical_name, is_literal, module_of
from m4.experiment import Experiment, partial_arguments


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
    """Returns the fields of a dataclass that are not at their defaults.

    Of an experiment all are returned: a baseline would inherit those that it does not say.
    """
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

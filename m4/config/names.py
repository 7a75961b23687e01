"""Names of what configs refer to, and which objects are text."""

from __future__ import annotations

from typing import Any

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
)

# Made from their bindings where no line names them.
PARTS = (Data, Training, Decoding, Sampling, Baselines, CorpusSpec, ResourceLevels, BadSteps)


def canonical_name(target: Any) -> str:
    """The name that configs use, whatever an import is called: "schedules.rsqrt"."""
    return f"{module_of(target).rpartition('.')[2]}.{target.__qualname__}"


def module_of(target: Any) -> str:
    ours = target is Experiment or (target in PARTS and target is not CorpusSpec)
    return "m4.experiment" if ours else target.__module__


def is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_literal, value))
    if isinstance(value, dict):
        return all(map(is_literal, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str)

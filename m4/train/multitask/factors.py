"""Factors by direction: loss weights and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from m4.settings import Factor, SettingError, check_value
from m4.train.multitask.groups import Directions

# {"en-gl": 2.0}, or a function of the directions' sizes like the samplers.
Factors = Mapping[str, Factor] | Callable[[dict[str, int]], Mapping[str, float]]


def by_direction(setting: str, given: Factors, directions: Directions) -> npt.NDArray[np.float32]:
    """The factor of each direction, in their order; 1 for what is not named.

    given: by direction ("en-gl"), language ("gl", both of its directions) or resource level
    ("low"); the narrower name counts. A function, such as a sampler, gives every direction a
    number; these are divided by their mean, so that equal numbers change nothing.

    Raises:
        SettingError: a name that is no direction, language or level here; a function that leaves
            out a direction or gives none a number above 0.
    """
    names = list(directions.names)
    if isinstance(given, Mapping):
        found = dict.fromkeys(names, 1.0)

        # Levels first, directions last.
        def narrower_later(name: str) -> tuple[bool, int]:
            return name not in directions.levels, -len(directions.named(name, setting))

        for name in sorted(given, key=narrower_later):
            found |= dict.fromkeys(directions.named(name, setting), given[name])
        return np.array([found[name] for name in names], np.float32)
    made = given(dict(directions.sizes))
    if missing := [name for name in names if name not in made]:
        raise SettingError(setting, given, f"a function that gives {missing[0]} a number too")
    values = [made[name] for name in names]
    for name, value in zip(names, values, strict=True):
        check_value(f"{setting}[{name}]", value, Factor)
    mean = math.fsum(values) / len(values)
    if not mean:
        raise SettingError(setting, given, "a function that gives a direction more than 0")
    return np.array([value / mean for value in values], np.float32)

"""Early stopping: keeps the best parameters, and stops when an evaluation no longer rises."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import jax

from m4.settings import Between, Factor, SettingError, checked


@checked
@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops when `metric` (higher is better) has not risen for `patience` evaluations.

    Attributes:
        metric: dev/chrf, the mean over directions, or dev/chrf/en-gl of one direction.
        patience: Number of evaluations without a rise after which training stops.
        min_delta: Smallest rise that counts for `patience`; the best parameters are kept anyway.
    """

    metric: str = "dev/chrf"
    patience: Annotated[int, Between(1, 10**6)] = 1
    min_delta: Factor = 0.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"dev/chrf(/\S+-\S+)?", self.metric):
            allowed = "dev/chrf or dev/chrf/<direction>: no other is better when it is higher"
            raise SettingError("EarlyStopping.metric", self.metric, allowed)


class EarlyStopper:
    """Keeps the parameters of the best evaluation, and knows when to stop."""

    def __init__(self, rule: EarlyStopping | None):
        self.rule = rule
        self.best: Any | None = None
        self.best_step = 0
        self.best_value = -math.inf
        self.risen_to = -math.inf
        self.since = 0

    @property
    def stopped(self) -> bool:
        return self.rule is not None and self.since >= self.rule.patience

    def evaluated(self, step: int, values: Mapping[str, float], params: Any) -> None:
        """Takes the values measured with the parameters after `step`."""
        if self.rule is None or self.rule.metric not in values:
            return
        value = values[self.rule.metric]
        if value > self.best_value:
            self.best_step, self.best_value = step, value
            # A copy, because the next step reuses the memory of its argument.
            self.best = jax.tree.map(lambda x: x.copy(), params)
        # Above the last rise, not above the best, so that many small rises add up to one.
        if value > self.risen_to + self.rule.min_delta:
            self.risen_to, self.since = value, 0
        else:
            self.since += 1

    def note(self) -> dict[str, Any]:
        """Returns the state in JSON, for `resume`."""
        if self.best is None:
            return {}
        return {
            "best_step": self.best_step,
            "best": self.best_value,
            "risen_to": self.risen_to,
            "since_best": self.since,
        }

    def resume(self, note: Mapping[str, Any], best: Any) -> None:
        """Continues from a checkpoint's note and best parameters."""
        self.best, self.best_step, self.best_value = best, note["best_step"], note["best"]
        self.risen_to, self.since = note["risen_to"], note["since_best"]

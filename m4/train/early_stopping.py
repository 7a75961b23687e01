"""Early stopping: keeps the best parameters, and stops when evaluations no longer improve."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import jax

from m4.settings import MUTABLE, Between, Factor, SettingError, checked


@checked
@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops when `metric` has not improved for `patience` evaluations (`Training.dev_period`).

    Attributes:
        metric: "dev/nll", in nats per token, or "dev/chrf", the mean over directions for greedy
            translations of the first `Training.dev_pairs` dev sentences; or either of one
            direction, "dev/nll/en-gl". Bilingual baselines use dev/chrf of all dev sentences.
        patience: Number of evaluations without improvement after which training stops.
        min_delta: Smallest improvement that counts for `patience`; the best parameters are kept
            in any case.
    """

    metric: str = "dev/chrf"
    patience: Annotated[int, Between(1, 10**6), MUTABLE] = 1
    min_delta: Annotated[Factor, MUTABLE] = 0.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"dev/(chrf|nll)(/\S+-\S+)?", self.metric):
            allowed = "dev/nll or dev/chrf, of all directions, or of one: dev/nll/en-gl"
            raise SettingError("EarlyStopping.metric", self.metric, allowed)

    @property
    def by_chrf(self) -> bool:
        return self.metric.startswith("dev/chrf")

    @property
    def direction(self) -> str | None:
        """The direction that counts, or None if all do."""
        return next(iter(self.metric.split("/")[2:]), None)

    def stopped(self, note: Mapping[str, Any]) -> str | None:
        """Describes why a training with this checkpoint note stopped, or returns None."""
        if note.get("since_best", 0) < self.patience:
            return None
        return (
            f"stopped early: {self.metric} was best, {abs(note['best']):.4g}, at step "
            f"{note['best_step']}, whose parameters are used "
            f"(EarlyStopping.patience = {self.patience})"
        )


@dataclasses.dataclass
class EarlyStopper:
    """Keeps the parameters of the best evaluation, and decides when to stop."""

    rule: EarlyStopping | None
    best: Any | None = None
    best_step: int = 0
    best_value: float = -math.inf
    risen_to: float = -math.inf
    since: int = 0

    @property
    def stopped(self) -> bool:
        return self.rule is not None and self.since >= self.rule.patience

    def evaluated(self, step: int, values: Mapping[str, float], params: Any) -> None:
        """Records the values measured with the parameters after `step`."""
        if self.rule is None or self.rule.metric not in values:
            return
        # Higher is better: a loss counts as its negative.
        value = values[self.rule.metric] * (1 if self.rule.by_chrf else -1)
        if value > self.best_value:
            self.best_step, self.best_value = step, value
            # A copy, because the next step reuses its argument's memory.
            self.best = jax.tree.map(lambda x: x.copy(), params)
        # Compared with the last rise, not the best, so that many small rises add up to one.
        if value > self.risen_to + self.rule.min_delta:
            self.risen_to, self.since = value, 0
        else:
            self.since += 1

    def note(self) -> dict[str, Any]:
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

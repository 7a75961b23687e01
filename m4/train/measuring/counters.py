"""Sums over the steps of a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.train.measuring.metric_window import MetricWindow
from m4.train.measuring.training_counts import DataCounter, ExpertLoadCounter


class Counters:
    """Sums over steps: until the next row of metrics, and over the whole run.

    Everything stays on the devices until it is asked for. Checkpoints' notes have it, so that a
    resumed run continues to count and its next row is the one of a run that was not interrupted.
    """

    def __init__(
        self,
        directions: Sequence[str],
        groups: Mapping[str, Sequence[str]],
        saved: Mapping[str, Any],
        start: int,
        tokens: int,
    ):
        """Continues from a checkpoint.

        Args:
            groups: Resource level -> directions.
            tokens: Tokens of one side of a batch, at most.
        """
        # A token chooses an expert once.
        self._loads = ExpertLoadCounter(directions, saved.get("assigned"), start, tokens)
        self._data = DataCounter(directions, saved.get("seen"), start, tokens, saved.get("drawn"))
        self._window = MetricWindow(directions, groups, saved.get("window"))

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes the metrics of a step."""
        self._loads.add(metrics.pop("expert_loads"))
        self._data.add(metrics.pop("data_counts"))
        self._window.add(step, metrics)

    def leave_out(self, step: int) -> None:
        """Takes a step that was added, and then skipped, out of the next row."""
        self._window.leave_out(step)

    def row(self) -> dict[str, float]:
        """Returns the metrics since the last row."""
        self._loads.flush()
        return {**self._window.flush(), **self._data.flush()}

    @property
    def text(self) -> str:
        return self._window.text

    def note(self) -> dict[str, Any]:
        return {**self._loads.note(), **self._data.note(), **self._window.note()}

    def write(self, folder: Path, note: Mapping[str, Any]) -> None:
        self._loads.write(folder, note)

"""A row of metrics.jsonl: the metrics of the steps since the last row."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

# With more experts a log row would be mostly their loads; `ExpertLoadCounter` counts them all.
_MOST_LOADS = 64


def _layer_row(layers: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
    """ "moe/<layer>/<metric>" -> number, short: six digits."""
    row = {}
    for layer, values in layers.items():
        for name, value in values.items():
            for part, number in _parts(name, value).items():
                row[f"moe/{layer}/{part}"] = float(f"{number:.6g}")
    return row


def shown_layers(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the layers' metrics that a row has: all else need not be kept."""
    return {
        layer: {name: value for name, value in values.items() if value.size <= _MOST_LOADS}
        for layer, values in layers.items()
    }


def _array(values: list[Any]) -> np.ndarray:
    """Returns numbers of JSON as an array; those that are no integers have 32 bits."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _parts(name: str, value: np.ndarray) -> dict[str, float]:
    """A scalar under its name; load_E as load/0, load/1, ..."""
    if value.ndim == 0:
        return {name: float(value)}
    return {f"{name.removesuffix('_E')}/{i}": float(x) for i, x in enumerate(value)}


class MetricWindow:
    """Metrics since the last log row: sums of counts, means of the rest, tokens a second."""

    def __init__(
        self,
        directions: Sequence[str],
        groups: Mapping[str, Sequence[str]],
        saved: Mapping[str, Any] | None = None,
    ):
        """saved: the window of a checkpoint's note, whose steps the next row begins with."""
        self._directions = list(directions)
        self._groups = groups
        self._steps: dict[int, dict[str, Any]] = {}
        self._since = time.monotonic()
        self.text = ""
        if saved is not None:
            self._since -= saved["seconds"]
            steps = jax.tree.map(_array, saved["metrics"], is_leaf=lambda x: isinstance(x, list))
            for i, step in enumerate(saved["steps"]):
                self._steps[step] = jax.tree.map(lambda x, at=i: x[at], steps)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step; what they are is not read before `flush`."""
        self._steps[step] = {**metrics, "layers": shown_layers(metrics["layers"])}

    def leave_out(self, step: int) -> None:
        """Forgets a step: its metrics are no numbers to average."""
        del self._steps[step]

    def note(self) -> dict[str, Any]:
        """Returns what `saved` must be to continue from here, under its name in a note.

        It has every step, not their sums: NumPy adds up many numbers in another order than one
        after the other.
        """
        if not self._steps:
            return {}
        steps = jax.device_get([*self._steps.values()])
        stacked = jax.tree.map(lambda *each: np.stack(each).tolist(), *steps)
        seconds = time.monotonic() - self._since
        return {"window": {"steps": [*self._steps], "seconds": seconds, "metrics": stacked}}

    def flush(self) -> dict[str, float]:
        """Returns the row, which is empty where all steps were left out.

        It has loss, nll, nll/<direction>, tokens_per_second, and the MoE layers' metrics, on
        average and of each ("moe/encoder_1/load/0").
        """
        steps = jax.device_get([*self._steps.values()])
        seconds = time.monotonic() - self._since
        self._steps, self._since = {}, time.monotonic()
        if not steps:
            return {}
        sums = jax.tree.map(lambda *each: np.sum(each, axis=0), *steps)
        layers = jax.tree.map(lambda x: x / len(steps), sums.pop("layers"))
        nll_D, tokens_D = sums.pop("nll_sum_D"), sums.pop("tokens_D")
        target, source = float(sums.pop("target_tokens")), float(sums.pop("source_tokens"))
        row = {"target_tokens": target, "source_tokens": source}
        row["tokens_per_second"] = (target + source) / max(seconds, 1e-9)
        for name, value in sums.items():
            row |= _parts(name, value / len(steps))
        row |= _layer_row(layers)
        row["nll"] = float(nll_D.sum() / max(tokens_D.sum(), 1))
        for name, nll, count in zip(self._directions, nll_D, tokens_D, strict=True):
            if count:
                row[f"nll/{name}"] = float(nll / count)
        parts = [f"nll {row['nll']:.2f}"]
        for level, members in self._groups.items():
            inside = [self._directions.index(name) for name in members]
            if tokens := tokens_D[inside].sum():
                row[f"nll/{level}"] = float(nll_D[inside].sum() / tokens)
                parts.append(f"{level} {row[f'nll/{level}']:.2f}")
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        self.text = " · ".join(parts)
        return row

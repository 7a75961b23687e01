"""Metrics and counts of a run's steps: rows of metrics.jsonl, choices of experts, training data.

Notes of checkpoints keep all of it, so that a resumed run continues to count, and its next row
equals that of an uninterrupted run.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.data.directions import key_of, pair_of
from m4.train.measuring import routing_counts

# Counts by direction of a step (`m4.train.step.count_data`).
DATA_COUNTS = ("pairs", "source_tokens", "target_tokens")
# With more experts, a row would be mostly their loads, which the counts of the whole run have.
_MOST_LOADS = 64


@dataclasses.dataclass
class Counters:
    """Sums over steps, until the next row of metrics and over the whole run.

    Everything stays on the devices until it is read. Padding does not count as tokens; both
    directions of a language count for it. Counting continues from `saved`, the note of the
    checkpoint of step `start`. A step adds at most `tokens` to one count. `groups` has directions
    by level.
    """

    directions: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    saved: dataclasses.InitVar[Mapping[str, Any]]
    start: dataclasses.InitVar[int]
    tokens: dataclasses.InitVar[int]

    def __post_init__(self, saved: Mapping[str, Any], start: int, tokens: int) -> None:
        directions = self.directions = list(self.directions)
        assigned = saved.get("assigned", {"from_step": start, "directions": [], "layers": {}})
        seen = saved.get("seen", {"from_step": start, "directions": {}})
        self._loads_from, self._data_from = assigned["from_step"], seen["from_step"]
        self._loads = routing_counts.Counts(directions)
        self._loads.replace(routing_counts.Counts.from_json(assigned))
        old = [seen["directions"].get(name, {}) for name in directions]
        self._data = {
            name: np.array([one.get(name, 0) for one in old], np.int64) for name in DATA_COUNTS
        }
        self._drawn_D = np.array(saved.get("drawn") or [0] * len(directions), np.int64)
        # A token chooses an expert at most once, so no count of a step exceeds the tokens.
        self._new_loads, self._new_data = DeviceSum(tokens), DeviceSum(tokens)
        self._steps: dict[int, dict[str, Any]] = {}
        self._since = time.monotonic()
        self.text = ""
        if (window := saved.get("window")) is not None:
            self._since -= window["seconds"]
            steps = jax.tree.map(_array, window["metrics"], is_leaf=lambda x: isinstance(x, list))
            for i, step in enumerate(window["steps"]):
                self._steps[step] = jax.tree.map(lambda x, at=i: x[at], steps)

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Stores the metrics of a step without reading them, and removes the counts."""
        if loads := metrics.pop("expert_loads"):
            self._new_loads.add(loads)
        self._new_data.add(dict(metrics.pop("data_counts")))
        self._steps[step] = {**metrics, "layers": shown_layers(metrics["layers"])}

    def leave_out(self, step: int) -> None:
        """Removes an added step, which was skipped, from the next row."""
        del self._steps[step]

    def _count(self) -> None:
        # A model counts all directions of the corpus; those never drawn come last.
        loads = (self._new_loads.take() or {}).items()
        self._loads.add({layer: loads_DE[: len(self.directions)] for layer, loads_DE in loads})
        if (added := self._new_data.take()) is not None:
            for name in DATA_COUNTS:
                self._data[name] += added[name]
            self._drawn_D += added["source_tokens"] + added["target_tokens"]

    def row(self) -> dict[str, float]:
        """Returns the metrics since the last row, without left-out steps.

        They are means, also for each MoE layer ("moe/encoder_1/load/0"), nll by direction, and the
        directions' shares of source and target tokens.
        """
        self._count()
        drawn_D, self._drawn_D = self._drawn_D, np.zeros_like(self._drawn_D)
        share_D = drawn_D / max(drawn_D.sum(), 1)
        shares = zip(self.directions, share_D, strict=True)
        shown = {f"share/{name}": float(f"{share:.6g}") for name, share in shares if share}
        steps = jax.device_get([*self._steps.values()])
        seconds = time.monotonic() - self._since
        self._steps, self._since = {}, time.monotonic()
        if not steps:
            return shown
        sums = jax.tree.map(lambda *each: np.sum(each, axis=0), *steps)
        layers = jax.tree.map(lambda x: x / len(steps), sums.pop("layers"))
        nll_D, tokens_D = sums.pop("nll_sum_D"), sums.pop("tokens_D")
        target, source = float(sums.pop("target_tokens")), float(sums.pop("source_tokens"))
        row = {"target_tokens": target, "source_tokens": source}
        row["tokens_per_second"] = (target + source) / max(seconds, 1e-9)
        for name, value in sums.items():
            row |= _parts(name, value / len(steps))
        for layer, values in layers.items():
            for name, value in values.items():
                for part, number in _parts(name, value).items():
                    row[f"moe/{layer}/{part}"] = float(f"{number:.6g}")
        row["nll"] = float(nll_D.sum() / max(tokens_D.sum(), 1))
        for name, nll, count in zip(self.directions, nll_D, tokens_D, strict=True):
            if count:
                row[f"nll/{name}"] = float(nll / count)
        parts = [f"nll {row['nll']:.2f}"]
        for level, members in self.groups.items():
            inside = [self.directions.index(name) for name in members]
            if tokens := tokens_D[inside].sum():
                row[f"nll/{level}"] = float(nll_D[inside].sum() / tokens)
                parts.append(f"{level} {row[f'nll/{level}']:.2f}")
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        self.text = " · ".join(parts)
        return row | shown

    def note(self) -> dict[str, Any]:
        """Returns the `saved` from which counting continues here.

        It has every step since the last row, because NumPy sums many numbers in its own order.
        """
        self._count()
        directions, languages = {}, dict[str, dict[str, int]]()
        for i, direction in enumerate(self.directions):
            count = directions[direction] = {n: int(self._data[n][i]) for n in DATA_COUNTS}
            total = languages.setdefault(key_of(pair_of(direction)), dict.fromkeys(DATA_COUNTS, 0))
            for name in DATA_COUNTS:
                total[name] += count[name]
        made: dict[str, Any] = {}
        if self._loads.layers:
            made["assigned"] = {"from_step": self._loads_from, **self._loads.as_json()}
        about = {"from_step": self._data_from, "directions": directions, "languages": languages}
        made |= {"seen": about, "drawn": self._drawn_D.tolist()}
        if self._steps:
            steps = jax.device_get([*self._steps.values()])
            stacked = jax.tree.map(lambda *each: np.stack(each).tolist(), *steps)
            seconds = time.monotonic() - self._since
            made["window"] = {"steps": [*self._steps], "seconds": seconds, "metrics": stacked}
        return made

    def write(self, folder: Path, note: Mapping[str, Any]) -> None:
        """Writes atlas.train.json for a model that counts choices of experts."""
        if self._loads.layers:
            about = {"split": "train", "steps": [self._loads_from, note["step"]]}
            about["train_pairs"] = note.get("train_pairs", {})
            routing_counts.write(folder / "atlas.train.json", self._loads, about)


class DeviceSum:
    """Integer counts of every step, summed on the devices.

    A step's counts of 2,048 experts take 14 MiB on every device; kept for each step until they are
    read, they would take more than a gigabyte.
    """

    def __init__(self, most: int):
        """Takes the most that a step adds to one number, as sums on devices are int32."""
        self._limit = max((2**31 - 1) // max(most, 1), 1)
        self._steps = 0
        self._sums: Any = None
        self._read: Any = None

    def add(self, counts: Any) -> None:
        """Adds a tree of int32 arrays, which must not be used afterwards."""
        if self._steps == self._limit:
            self._read, self._sums, self._steps = self.take(), None, 0
        self._sums = counts if self._sums is None else _add(self._sums, counts)
        self._steps += 1

    def take(self) -> Any:
        """Returns the sums since the last call, numpy int64, or None if nothing was added."""
        read, sums = self._read, jax.device_get(self._sums)
        self._read, self._sums, self._steps = None, None, 0
        if sums is None:
            return read
        sums = jax.tree.map(lambda x: np.asarray(x, np.int64), sums)
        return sums if read is None else jax.tree.map(np.add, read, sums)


@functools.partial(jax.jit, donate_argnums=0)
def _add(sums: Any, counts: Any) -> Any:
    return jax.tree.map(jnp.add, sums, counts)


def shown_layers(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the layers' metrics that appear in a row; others need not be kept."""
    return {
        layer: {name: value for name, value in values.items() if value.size <= _MOST_LOADS}
        for layer, values in layers.items()
    }


def _array(values: list[Any]) -> np.ndarray:
    """Returns JSON numbers as an array, float32 if they are not integers."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _parts(name: str, value: np.ndarray) -> dict[str, float]:
    """Yields a scalar under its name, and load_E as load/0, load/1, ..."""
    if value.ndim == 0:
        return {name: float(value)}
    return {f"{name.removesuffix('_E')}/{i}": float(x) for i, x in enumerate(value)}

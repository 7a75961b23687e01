"""Counts over all steps of a run: choices of experts (the atlas), and the training data.

The notes of checkpoints keep them, so that a resumed run continues to count.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.data.preprocess import language_of
from m4.train.measuring import routing_counts

# What a step counts by direction (`m4.train.step.count_data`).
DATA_COUNTS = ("pairs", "source_tokens", "target_tokens")


class DeviceSum:
    """Integers that every step counts, added up on the devices.

    A step's counts of 2,048 experts are 14 MiB on every device: kept one by one until they are
    read they would be more than a gigabyte.
    """

    def __init__(self, most: int):
        """most: what a step adds to one number at most: sums on the devices are int32."""
        self._limit = max((2**31 - 1) // max(most, 1), 1)
        self._steps = 0
        self._sums: Any = None
        self._read: Any = None

    def add(self, counts: Any) -> None:
        """A tree of arrays int32, which are not to be used any more."""
        if self._steps == self._limit:
            self._read, self._sums, self._steps = self.take(), None, 0
        self._sums = counts if self._sums is None else _add(self._sums, counts)
        self._steps += 1

    def take(self) -> Any:
        """The sums since the last call, numpy int64; None: nothing was added."""
        read, sums = self._read, jax.device_get(self._sums)
        self._read, self._sums, self._steps = None, None, 0
        if sums is None:
            return read
        sums = jax.tree.map(lambda x: np.asarray(x, np.int64), sums)
        return sums if read is None else jax.tree.map(np.add, read, sums)


@functools.partial(jax.jit, donate_argnums=0)
def _add(sums: Any, counts: Any) -> Any:
    return jax.tree.map(jnp.add, sums, counts)


class ExpertLoadCounter:
    """Choices of experts that found a slot, of all steps, by layer, direction and expert."""

    def __init__(
        self, directions: Sequence[str], saved: Mapping[str, Any] | None, start: int, most: int
    ):
        """Continues from a note.

        Args:
            saved: What `note` gave. None at the beginning.
            most: Choices that a step can count for one direction and expert.
        """
        # A checkpoint without counts: counting begins with the next step.
        self._from = start if saved is None else saved["from_step"]
        self._counts = routing_counts.Counts(directions)
        if saved is not None:
            self._counts.replace(routing_counts.Counts.from_json(saved))
        self._steps = DeviceSum(most)

    def add(self, layers: Mapping[str, Any]) -> None:
        """assigned_DE of each layer of a step."""
        if layers:
            self._steps.add(layers)

    def flush(self) -> None:
        self._counts.add(self._steps.take() or {})

    def note(self) -> dict[str, Any]:
        """Returns what `saved` must be to continue from here, under its name in a note."""
        self.flush()
        if not self._counts.layers:
            return {}
        return {"assigned": {"from_step": self._from, **self._counts.as_json()}}

    def write(self, folder: Path, note: Mapping[str, Any]) -> None:
        if self._counts.layers:
            about = {"split": "train", "steps": [self._from, note["step"]]}
            about["train_pairs"] = note.get("train_pairs", {})
            routing_counts.write(folder / "atlas.train.json", self._counts, about)


class DataCounter:
    """Pairs and tokens of all batches so far, by direction and language.

    Padding is no token. Both directions of a language count for it.
    """

    def __init__(
        self,
        directions: Sequence[str],
        saved: Mapping[str, Any] | None,
        start: int,
        most: int,
        drawn: Sequence[int] | None = None,
    ):
        """Continues from a note.

        Args:
            saved: What `note` gave. None at the beginning.
            most: Tokens that a step can count for one direction.
            drawn: Tokens by direction since the last row, of a note.
        """
        self._directions = list(directions)
        self._from = start if saved is None else saved["from_step"]
        old = {} if saved is None else saved["directions"]
        self._counts = {
            name: np.array([old.get(d, {}).get(name, 0) for d in directions], np.int64)
            for name in DATA_COUNTS
        }
        self._drawn_D = np.array(drawn or [0] * len(directions), np.int64)
        self._steps = DeviceSum(most)

    def add(self, counts: Mapping[str, Any]) -> None:
        """A step's integers by direction, of each of `DATA_COUNTS`."""
        self._steps.add(dict(counts))

    def _read(self) -> None:
        """Counts what was added."""
        if (added := self._steps.take()) is not None:
            for name in DATA_COUNTS:
                self._counts[name] += added[name]
            self._drawn_D += added["source_tokens"] + added["target_tokens"]

    def flush(self) -> dict[str, float]:
        """ "share/<direction>": of the tokens since the last call, source and target."""
        self._read()
        drawn_D, self._drawn_D = self._drawn_D, np.zeros_like(self._drawn_D)
        share_D = drawn_D / max(drawn_D.sum(), 1)
        row = zip(self._directions, share_D, strict=True)
        return {f"share/{name}": float(f"{share:.6g}") for name, share in row if share}

    def note(self) -> dict[str, Any]:
        """Returns what `saved` and `drawn` must be to continue from here, by name."""
        self._read()
        directions = {
            direction: {name: int(self._counts[name][i]) for name in DATA_COUNTS}
            for i, direction in enumerate(self._directions)
        }
        languages: dict[str, dict[str, int]] = {}
        for direction, count in directions.items():
            total = languages.setdefault(language_of(direction), dict.fromkeys(DATA_COUNTS, 0))
            for name in DATA_COUNTS:
                total[name] += count[name]
        about = {"from_step": self._from, "directions": directions, "languages": languages}
        return {"seen": about, "drawn": self._drawn_D.tolist()}

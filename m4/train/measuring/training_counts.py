"""What is counted over all steps of a run and kept in its checkpoints' notes, so that a resumed run
continues to count: choices of experts (the atlas), and the training data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m4.data.preprocess import language_of
from m4.train.measuring import routing_counts

# What a step counts by direction (`m4.train.step.count_data`).
DATA_COUNTS = ("pairs", "source_tokens", "target_tokens")


class ExpertLoadCounter:
    """Choices of experts that found a slot, of all steps, by layer, direction and expert."""

    def __init__(self, directions: Sequence[str], saved: Mapping[str, Any] | None, start: int):
        # A checkpoint without counts: counting begins with the next step.
        self._from = start if saved is None else saved["from_step"]
        self._counts = routing_counts.Counts(directions)
        if saved is not None:
            self._counts = routing_counts.Counts.from_json(saved)
        self._steps: list[Mapping[str, Any]] = []

    def add(self, layers: Mapping[str, Any]) -> None:
        """seated_DE of each layer; stays on the devices until `flush`."""
        if layers:
            self._steps.append(layers)

    def flush(self) -> None:
        for layers in jax.device_get(self._steps):
            self._counts.add(layers)
        self._steps = []

    def note(self) -> dict[str, Any]:
        """What `saved` must be to continue from here, under its name in a note."""
        self.flush()
        if not self._counts.layers:
            return {}
        return {"seated": {"from_step": self._from, **self._counts.as_json()}}

    def write(self, folder: Path, note: Mapping[str, Any]) -> None:
        if self._counts.layers:
            about = {"split": "train", "steps": [self._from, note["step"]]}
            about["train_pairs"] = note.get("train_pairs", {})
            routing_counts.write(folder / "atlas.train.json", self._counts, about)


class DataCounter:
    """Pairs and tokens of all batches so far, by direction and language.

    Padding is no token. Both directions of a language count for it.
    """

    def __init__(self, directions: Sequence[str], saved: Mapping[str, Any] | None, start: int):
        self._directions = list(directions)
        self._from = start if saved is None else saved["from_step"]
        old = {} if saved is None else saved["directions"]
        self._counts = {
            name: np.array([old.get(d, {}).get(name, 0) for d in directions], np.int64)
            for name in DATA_COUNTS
        }
        self._steps: list[Mapping[str, Any]] = []

    def add(self, counts: Mapping[str, Any]) -> None:
        """Integers by direction of each of `DATA_COUNTS`; on the devices until `flush`."""
        self._steps.append(counts)

    def flush(self) -> dict[str, float]:
        """Counts what was added. Returns "share/<direction>": of its tokens, source and target."""
        steps, self._steps = jax.device_get(self._steps), []
        tokens_D = np.zeros(len(self._directions), np.int64)
        for step in steps:
            for name in DATA_COUNTS:
                self._counts[name] += step[name]
            tokens_D += step["source_tokens"].astype(np.int64) + step["target_tokens"]
        share_D = tokens_D / max(tokens_D.sum(), 1)
        row = zip(self._directions, share_D, strict=True)
        return {f"share/{name}": float(f"{share:.6g}") for name, share in row if share}

    def note(self) -> dict[str, Any]:
        """What `saved` must be to continue from here, under its name in a note."""
        self.flush()
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
        return {"seen": about}

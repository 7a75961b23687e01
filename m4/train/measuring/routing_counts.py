"""Counts of tokens' choices by MoE layer, translation direction and expert, as JSON.

Only choices that found a slot in the expert's buffer count.

Training writes MODEL_DIR/atlas.train.json, decoding MODEL_DIR/decodes/atlas.<split>.json;
`m4.eval.report.atlas` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.settings import InputError
from m4.storage.files import read_json, write_json
from m4.storage.records import count, listed, named, record, text

# Records of `Counts.as_json` and of the whole file.
KIND = record(
    {
        "directions": listed(text),
        "layers": named(listed(listed(count))),
        "split?": text,
        "train_pairs?": named(count),
    }
)
# Raised when older files can no longer be read.
FORMAT = 1


class Counts:
    """Sums by layer, {"encoder_1": int64 [directions, E], ...}, with rows for `directions`."""

    def __init__(self, directions: Sequence[str]) -> None:
        self.directions = list(directions)
        self.layers: dict[str, npt.NDArray[np.int64]] = {}

    def add(self, layers: Mapping[str, npt.ArrayLike]) -> None:
        """Adds assigned_DE of each layer, for one or more steps."""
        for layer, value in layers.items():
            assigned_DE = np.asarray(value, np.int64)
            assert len(assigned_DE) == len(self.directions), (layer, assigned_DE.shape)
            self.layers[layer] = self.layers.get(layer, np.zeros_like(assigned_DE)) + assigned_DE

    def replace(self, other: Counts) -> None:
        """Replaces the counts of every direction that `other` has counted."""
        for layer, assigned_DE in other.layers.items():
            mine = self.layers.setdefault(
                layer, np.zeros((len(self.directions), assigned_DE.shape[1]), np.int64)
            )
            for direction, row in zip(other.directions, assigned_DE, strict=True):
                mine[self.directions.index(direction)] = row

    def as_json(self) -> dict[str, Any]:
        return {
            "directions": self.directions,
            "layers": {layer: assigned_DE.tolist() for layer, assigned_DE in self.layers.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Counts:
        """Reads JSON. Raises ValueError unless each layer has a row of counts per direction."""
        counts = cls(saved["directions"])
        for layer, rows in saved["layers"].items():
            sizes = {len(row) for row in rows}
            if len(rows) != len(counts.directions) or len(sizes) > 1 or 0 in sizes:
                raise ValueError(f"layers.{layer} has not one row of counts a direction")
        counts.add(saved["layers"])
        return counts


def write(path: Path, counts: Counts, about: Mapping[str, Any]) -> None:
    """Writes a JSON object with `about` (steps, train_pairs, ...), directions and layers."""
    write_json(path, {"format": FORMAT, **about, **counts.as_json()})


def read(path: Path) -> tuple[Counts, dict[str, Any]]:
    """Returns (counts, the whole file). Raises ValueError if it is not such a file."""

    def parse(saved: dict[str, Any]) -> tuple[Counts, dict[str, Any]]:
        if saved["format"] != FORMAT:
            raise InputError(f"{path}: format {saved['format']}, this m4 reads {FORMAT}")
        return Counts.from_json(saved), saved

    return read_json(path, KIND, parse)

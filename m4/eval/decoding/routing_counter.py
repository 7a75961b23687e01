"""Counts of the experts that decoded sentences choose, for a test set's atlas."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m4.eval.decoding.decode import Batch, TrainedModel
from m4.eval.decoding.search import run_model, unstacked
from m4.model.moe import assigned_choices
from m4.model.transformer import Transformer
from m4.train.measuring import routing_counts
from m4.train.step import apply_model


class RoutingCounter:
    """Counter of assigned choices by direction, MoE layer and expert, for `on_batch`.

    One forward pass over a batch and its translations gives them, as in training. The counts are
    saved in a file of `m4.train.measuring.routing_counts`, which grows with every set of
    directions. A file with another `about` is replaced.
    """

    def __init__(
        self, path: Path, directions: Sequence[str], trained: TrainedModel, about: Mapping[str, Any]
    ) -> None:
        """Takes the D training directions, and `about`, JSON of what decides the translations."""
        self._path, self._directions = path, list(directions)
        self._about = json.loads(json.dumps(about))
        self._trained = trained
        self._counts = routing_counts.Counts(directions)
        if path.is_file():
            there, saved = routing_counts.read(path)
            if {**saved, **self._about} == saved and there.directions == self._counts.directions:
                self._counts = there
        self.current = routing_counts.Counts([])  # directions of the sources of the present call
        self._number_of_source = np.zeros(0, np.int32)

    def starting(self, directions: Sequence[str]) -> None:
        """Sets the directions of the next call's sources."""
        self.current = routing_counts.Counts(list(dict.fromkeys(directions)))
        numbers = {name: i for i, name in enumerate(self._directions)}
        self._number_of_source = np.array([numbers[name] for name in directions], np.int32)

    def __call__(self, batch: Batch, best_BT: np.ndarray) -> None:
        """Adds a batch, with its translations `best_BT`."""
        # Filler rows have the direction D, which is not counted.
        number_B = np.full(len(best_BT), len(self._directions), np.int32)
        number_B[: len(batch.rows)] = self._number_of_source[batch.rows]
        arrays = forced(batch.tokens_BL, best_BT, number_B)
        one, what = self._trained, "the program that counts routing"
        found = run_model(one.layout, what, counted, one.model, one.params, arrays)
        here = [self._directions.index(name) for name in self.current.directions]
        self.current.add({layer: x_DE[here] for layer, x_DE in jax.device_get(found).items()})

    def save(self) -> None:
        """Writes the file, before the translations: existing ones are not counted again."""
        self._counts.replace(self.current)
        if self._counts.layers:
            routing_counts.write(self._path, self._counts, self._about)


def forced(
    tokens_BL: np.ndarray, best_BT: np.ndarray, number_B: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the batch of one forward pass over sources and their translations."""
    return {
        "encoder_input_tokens": tokens_BL,
        "decoder_input_tokens": np.pad(best_BT[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": best_BT,
        "encoder_direction_ids": np.repeat(number_B[:, None], tokens_BL.shape[1], axis=1),
        "direction_ids": np.repeat(number_B[:, None], best_BT.shape[1], axis=1),
    }


def counted(
    model: Transformer, params: Any, batch: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns MoE layer -> assigned choices, int32 [D, E]."""
    _, sown = apply_model(*unstacked(model, params), batch, None)
    return assigned_choices(sown)

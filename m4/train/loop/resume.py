"""A run taken up again from a checkpoint."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from m4.settings import InputError
from m4.storage.checkpoints import Checkpoints, shapes
from m4.train import average
from m4.train.early_stopping import EarlyStopper
from m4.train.state import TrainState


def check_same(checkpoint: str, saved: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    """ValueError: the checkpoint was trained on something else."""
    for name in ("vocabulary", "stream"):
        if name in note and saved.get(name) != note[name]:
            raise InputError(
                f"{checkpoint} was trained with another {name} "
                f"({str(saved.get(name))[:12]} there, {str(note[name])[:12]} here); "
                "choose another MODEL_DIR, or start over with --fresh"
            )


def restore(
    checkpoints: Checkpoints,
    step: int,
    saved: Mapping[str, Any],
    state: TrainState,
    stopper: EarlyStopper,
    about: Mapping[str, Any],
) -> TrainState:
    """The state of a step, sharded as `state`; the stopper continues from it. saved: its note.

    about: this run's. The state of groups of directions is taken over from a step with the same
    groups; else it begins again.
    """
    if "averaged" in saved:  # by `m4 average`
        raise InputError(
            f"{checkpoints.folder}/{step} is a mean of checkpoints, without an optimizer's state: "
            "begin another run from its parameters with --init_from"
        )
    items = {name: shapes(tree) for name, tree in average.items(state).items()}
    if saved.get("gradients", {}) != about.get("gradients"):
        items.pop("groups", None)
    if stopper.rule is not None and "best_step" in saved:
        items["best"] = shapes(state.params)
    found = checkpoints.restore(step, items)
    if "best" in found:
        stopper.resume(saved, found["best"])
    at = jax.device_put(np.asarray(step, np.int32), state.step.sharding)
    return average.from_items(at, found, state.optimizer)

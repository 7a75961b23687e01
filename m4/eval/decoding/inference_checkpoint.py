"""Opening a trained model's checkpoint for inference: its step, note and parameters."""

from pathlib import Path
from typing import Any

import jax

from m4.data.vocabulary.vocabulary import SourceAndTarget, Vocabulary
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.mesh import Layout
from m4.settings import InputError
from m4.storage.checkpoints import Checkpoints, Removed, by_path, check_weights, shapes
from m4.storage.steps import whole_step


def restore_params(
    model: Transformer,
    checkpoints: Path | str,
    step: int | None = None,
    vocabulary: Vocabulary | SourceAndTarget | None = None,
    layout: Layout | None = None,
    item: str | None = None,
) -> tuple[Any, int, dict[str, Any]]:
    """Returns the parameters that a step translates with, the step, and its note.

    They are the best ones if training had early stopping, otherwise their average if the optimizer
    made one, otherwise those of the step. All processes call this; a device reads only its shards.

    Args:
        vocabulary: Vocabulary that the model must have been trained with.
        layout: Sharding of the parameters. Defaults to the first device.
        item: "params" to get those of the step in any case.
    """
    folder, variables = Path(checkpoints), abstract_variables(model)
    while True:
        found = distributed.on_primary_then_broadcast(
            "checkpoints", lambda: whole_step(folder, step, used=item is None)
        )
        if found is None:
            raise InputError(f"{folder}: no checkpoints; train first, or give another MODEL_DIR")
        with Checkpoints(checkpoints, read_only=True) as store:
            try:
                note = store.note(found)
                if vocabulary is not None and note.get("vocabulary") != vocabulary.fingerprint:
                    raise InputError(
                        f"{folder}/{found} was trained with another vocabulary than "
                        f"{vocabulary.path} ({str(note.get('vocabulary'))[:12]} there, "
                        f"{vocabulary.fingerprint[:12]} here)"
                    )
                of = store.used(found) if item is None else item
                params = store.restore(found, {of: placed(variables, layout)})[of]
                check_weights(store.folder / str(found), by_path(params))
                return params, found, note
            except Removed:
                # Training keeps only the last ones, and has written a newer one.
                if step is not None or distributed.is_distributed():
                    raise


def placed(variables: Any, layout: Layout | None) -> Any:
    """Returns shapes of parameters with shardings: the layout's, or the first device."""
    params, here = dict(variables["params"]), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if layout is None:
        return shapes(params, jax.tree.map(lambda _: here, params))
    return shapes(params, layout.shardings(variables["params_axes"], params))

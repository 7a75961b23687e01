"""A trained model's checkpoint, opened to be used: its step, note and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from m4.data.vocabulary.vocabulary import SourceAndTarget, Vocabulary
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import InputError
from m4.storage.checkpoints import Checkpoints, Removed, shapes
from m4.storage.steps import whole_step


class _Found(NamedTuple):
    """An open checkpoint that fits the model; item: with its parameters; variables: the model's, as
    shapes."""

    store: Checkpoints
    step: int
    item: str
    note: dict[str, Any]
    variables: Any


@contextmanager
def _opened(
    model: Transformer,
    checkpoints: Path | str,
    step: int | None,
    vocabulary: Vocabulary | SourceAndTarget | None,
    item: str | None = None,
) -> Iterator[_Found]:
    folder = Path(checkpoints)
    found = distributed.on_primary_then_broadcast(
        "checkpoints", lambda: whole_step(Path(checkpoints), step, used=item is None)
    )
    if found is None:
        raise InputError(f"{folder}: no checkpoints; train first, or give another MODEL_DIR")
    store = Checkpoints(checkpoints, read_only=True)
    try:
        note = store.note(found)
        if vocabulary is not None and note.get("vocabulary") != vocabulary.fingerprint:
            raise InputError(
                f"{folder}/{found} was trained with another vocabulary than {vocabulary.path} "
                f"({str(note.get('vocabulary'))[:12]} there, {vocabulary.fingerprint[:12]} here)"
            )
        variables = abstract_variables(model)
        item = store.used(found) if item is None else item
        store.check_shapes(found, item, variables["params"])
        yield _Found(store, found, item, note, variables)
    finally:
        store.close()


def trained_step(
    model: Transformer,
    checkpoints: Path | str,
    vocabulary: Vocabulary | SourceAndTarget | None = None,
    step: int | None = None,
) -> int:
    """The step, None: the latest, after the checks of `restore_params`; no parameter is read."""
    with _opened(model, checkpoints, step, vocabulary) as found:
        return found.step


def restore_params(
    model: Transformer,
    checkpoints: Path | str,
    step: int | None = None,
    vocabulary: Vocabulary | SourceAndTarget | None = None,
    layout: Layout | None = None,
    item: str | None = None,
) -> tuple[Any, int, dict[str, Any]]:
    """Parameters to use of a step (default: the latest), the step, and its note.

    The best ones where training had early stopping, else their average where the optimizer made
    one, else those of the step.

    Args:
      model: the module that was trained; decides the shapes.
      checkpoints: a folder of `m4.storage.checkpoints.Checkpoints`.
      vocabulary: the one that the model must have been trained with.
      layout: how parameters are sharded; None: all on the first device. Each device reads its
        shards only. With several processes all of them call this.
      item: "params": those of the step in any case.

    Raises:
      ValueError: there is no such checkpoint, it belongs to another model, or it was trained with
        another vocabulary.
    """
    while True:
        try:
            with _opened(model, checkpoints, step, vocabulary, item) as found:
                wanted = {found.item: _placed(found.variables, layout)}
                restored = found.store.restore(found.step, wanted)[found.item]
                return restored, found.step, found.note
        except Removed:
            # Training keeps the last ones only, and there is a newer one now.
            if step is not None or distributed.is_distributed():
                raise


def _placed(variables: Any, layout: Layout | None) -> Any:
    """The parameters as shapes with shardings: the layout's, or the first device."""
    params = dict(variables["params"])
    if layout is not None:
        return shapes(params, layout.shardings(variables["params_axes"], params))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return shapes(params, jax.tree.map(lambda _: here, params))

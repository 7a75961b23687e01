"""Checkpoints: parameters, optimizer and a JSON note, atomically, by orbax (its only importer)."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The folder `checkpoints/<step>/` of a model: items params, optimizer, note.

    Saving is asynchronous (call `wait` or `close` before reading) and atomic: a step's folder
    appears, complete, by a rename, so that a killed job leaves the last complete step.
    """

    def __init__(self, folder: Path | str, *, keep: int = 3, read_only: bool = False):
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax narrates every save
        self.folder = Path(folder).absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=("params", "optimizer", "note"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
            ),
        )

    @property
    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, params: Any, optimizer: Any, note: Mapping[str, Any]) -> None:
        """Starts to save; returns once the arrays may be overwritten. A saved step is left alone."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                optimizer=ocp.args.StandardSave(optimizer),
                note=ocp.args.JsonSave(dict(note)),
            ),
        )

    def note(self, step: int) -> dict[str, Any]:
        """The JSON note of a step: what made it, and the fingerprints of its data and vocabulary."""
        return dict(
            self._manager.restore(step, args=ocp.args.Composite(note=ocp.args.JsonRestore()))[
                "note"
            ]
        )

    def restore(self, step: int, params: Any, optimizer: Any | None = None) -> tuple[Any, Any]:
        """Arrays in the shapes, types and shardings of the given trees (of ShapeDtypeStruct).

        Without `optimizer` only the parameters are read.
        """
        items = {"params": ocp.args.StandardRestore(params)}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardRestore(optimizer)
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        return found["params"], found["optimizer"] if optimizer is not None else None

    def wait(self) -> None:
        """Returns when every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of threads."""
        self._manager.close()


def shapes(tree: Any, shardings: Any | None = None) -> Any:
    """ShapeDtypeStructs of a tree of arrays, with these shardings (or each array's own)."""
    if shardings is None:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
            tree,
        )
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )

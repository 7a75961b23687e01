"""Checkpoints: parameters, optimizer and a JSON note, atomically, by orbax (its only importer)."""

import json
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from m4.parallel import distributed
from m4.settings import InputError
from m4.storage import remote

# In a run's folder: the scores of its checkpoints by step (`m4 eval --watch`).
SCORES_BY_STEP = "scores_by_step.jsonl"
# What `keep_best` goes by, of the values measured at a checkpoint's step; the lowest is the best.
MEASURE = "dev/nll"


class Checkpoints:
    """The folder `checkpoints/<step>/` of a model: items params, optimizer, average, best, note.

    `average` are averaged parameters, where the optimizer makes them (`m4.train.average`), `best`
    those of the best evaluation so far, where there is early stopping.

    With several processes all of them open, save and restore together; read-only, each alone.

    Saving is asynchronous (call `wait` or `close` before reading) and atomic: a step's folder
    appears, complete, by a rename, so that a killed job leaves the last complete step.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 3,
        keep_period: int | None = None,
        keep_best: int = 0,
        read_only: bool = False,
    ):
        """A save removes all steps but the last `keep`, the multiples of `keep_period`, the
        `keep_best` ones of lowest `MEASURE`, and those that are marked as best in
        `SCORES_BY_STEP`."""
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax logs every save
        self._here = Path(folder).absolute()
        self.folder = remote.remote_path(self._here)
        self._marked = _Marked()
        policies: list[managers.PreservationPolicy] = [managers.LatestN(n=keep), self._marked]
        if keep_period is not None:
            policies.append(managers.EveryNSteps(keep_period))
        if keep_best:
            policies.append(
                managers.BestN(
                    get_metric_fn=_measure,
                    reverse=True,
                    n=keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=("params", "optimizer", "average", "best", "note"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies),
                best_fn=_measure if keep_best else None,
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
                multiprocessing_options=_processes(alone=read_only),
            ),
        )

    @property
    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        note: Mapping[str, Any],
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to save trees of arrays under their names ("params", "optimizer", ...).

        measured: with these parameters, at this step; with `MEASURE` it may be one of the best.
        Returns once the arrays may be overwritten. A step that is saved already stays as it is.
        """
        if step in self._manager.all_steps():
            return
        # A run resumes from the checkpoint: the files next to it must not be older. And no process
        # may write any shard once the folder is another job's.
        self._marked.steps = distributed.on_primary_then_broadcast(
            "to save a checkpoint", self._push_then_marked
        )
        saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        known = (measured or {}).get(MEASURE)
        self._manager.save(
            step,
            args=ocp.args.Composite(**saves, note=ocp.args.JsonSave(dict(note))),
            metrics=None if known is None else {MEASURE: float(known)},
        )

    def _push_then_marked(self) -> list[int]:
        remote.push(self._here)
        path = self.folder.parent / SCORES_BY_STEP
        try:
            rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
            return sorted({int(row["step"]) for row in rows if row["best"]})
        except (OSError, ValueError, TypeError, KeyError) as error:  # no reason to stop training
            print(f"{path}: cannot be read ({error}); the best step stays", file=sys.stderr)
            return list(self._marked.steps)

    def note(self, step: int) -> dict[str, Any]:
        """The JSON note of a step: what made it, and its data's and vocabulary's fingerprints."""
        found = self._manager.restore(step, args=ocp.args.Composite(note=ocp.args.JsonRestore()))
        return dict(found["note"])

    def restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        """The named trees of a step, in the shapes, types and shardings of the given ones.

        Give ShapeDtypeStructs; what is not named is not read.
        """
        restores = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        found = self._manager.restore(step, args=ocp.args.Composite(**restores))
        return {name: found[name] for name in items}

    def used(self, step: int) -> str:
        """The item whose parameters a step is used with: the best, averaged, or plain ones."""
        there = self.folder / str(step)
        return next(name for name in ("best", "average", "params") if (there / name).exists())

    def check_shapes(self, step: int, name: str, tree: Any) -> None:
        """Raises ValueError when an item of a step has other arrays than `tree` (nested dicts).

        To be called before `restore`, whose message has thousands of lines.
        """
        alone = _processes(alone=True)
        with ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
            saved = _by_path(reader.metadata(self.folder / str(step) / name).item_metadata)
        wanted = _by_path(tree)
        for path in sorted(saved.keys() | wanted.keys()):
            here, there = wanted.get(path), saved.get(path)
            if here != there:
                raise InputError(
                    f"{self.folder}/{step}: {path} is {there or 'missing'} there and "
                    f"{here or 'missing'} in the model: it belongs to another config"
                )

    def wait(self) -> None:
        """Returns when every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and ends threads; does neither once the folder is another job's."""
        if not remote.lease_lost(self._here):
            self._manager.close()


class _Marked:
    """orbax's rule that these steps stay."""

    steps: Collection[int] = ()

    def should_preserve(
        self,
        checkpoints: Sequence[managers.PolicyCheckpointInfo],
        *,
        context: managers.PreservationContext,
    ) -> Sequence[bool]:
        return [one.step in self.steps for one in checkpoints]


def _measure(measured: Mapping[str, float]) -> float:
    return measured[MEASURE]


def _processes(*, alone: bool) -> ocp.options.MultiprocessingOptions:
    """Which processes wait for each other: all of them, or none for this one."""
    if jax.process_count() == 1 or not alone:
        return ocp.options.MultiprocessingOptions()
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )


def _by_path(tree: Any) -> dict[str, tuple[int, ...]]:
    """ "a/b" -> shape of every array of nested dicts."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def complete_steps(folder: Path) -> list[int]:
    """The complete steps in a folder of checkpoints, ascending; without reading any."""
    there = remote.remote_path(folder)
    if not there.is_dir():
        return []
    return sorted(
        int(path.name) for path in there.iterdir() if path.name.isdecimal() and _is_whole(path)
    )


def latest_step(folder: Path) -> int | None:
    """The last complete step in a folder of checkpoints, or None; without reading any."""
    return max(complete_steps(folder), default=None)


def _is_whole(step: epath.Path) -> bool:
    """On a disk a step has its name once it is whole; a store cannot rename, so orbax marks it."""
    return "://" not in os.fspath(step) or (step / "commit_success.txt").exists()


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

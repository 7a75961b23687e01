"""Checkpoints: parameters, optimizer and a JSON note, atomically, by orbax (its only importer)."""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint import future

from m4.parallel import distributed
from m4.settings import InputError, first_line
from m4.storage import manifest
from m4.storage.files import read_jsonl, undamaged
from m4.storage.local_copy import address_of, upload
from m4.storage.numbers import is_float
from m4.storage.records import count, flag, named, record, text
from m4.storage.steps import is_removed, latest_step, used_item, whole_step


class Removed(InputError):
    """The step went while it was read: training keeps the last ones only."""


# In a run's folder: the scores of its checkpoints by step (`m4 eval --watch`).
SCORES_BY_STEP = "scores_by_step.jsonl"
# Size of a file of arrays: small enough that several threads share the hashing.
_FILE_BYTES = 1 << 25
# What a disk refuses, and the modules of orbax that save in threads.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_THREADS = ("future", "async_checkpointer", "checkpoint_manager")
# What `keep_best` goes by, of the values measured at a checkpoint's step; the lowest is the best.
MEASURE = "dev/nll"


_SEEN = named(record({"pairs": count}))
_NOTE = record(
    {
        "step?": count,
        "best_step?": count,
        "finished?": flag,
        "vocabulary?": text,
        "averaged?": named(text),
        "seen?": record({"from_step": count, "directions": _SEEN, "languages": _SEEN}),
    }
)


class Checkpoints:
    """The checkpoints of a model, `checkpoints/<step>/`.

    A step has the items params, optimizer, groups, average, best and note. `average` are averaged
    parameters, where the optimizer makes them (`m4.train.average`), `best` those of the best
    evaluation so far, where there is early stopping.

    With several processes all of them open, save and restore together; read-only, each alone.

    Saving is asynchronous (call `wait` or `close` before reading) and atomic: a step's folder
    appears, complete and with its manifest, by a rename, so that a killed job leaves the last
    complete step. Whoever opens the folder for writing goes back to the last whole one
    (`whole_step`).
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 3,
        keep_period: int | None = None,
        keep_best: int = 0,
        *,
        read_only: bool = False,
    ):
        """Opens a folder of checkpoints.

        A save removes all steps but the last `keep`, those that `keep_period` divides, the
        `keep_best` of lowest `MEASURE`, and those that are marked as best in `SCORES_BY_STEP`.
        """
        _quiet()
        self._here = Path(folder).absolute()
        self.folder = address_of(self._here)
        if not read_only:
            distributed.on_primary_then_broadcast(
                "checkpoints", lambda: whole_step(self._here, move_aside=True)
            )
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(), multiprocessing_options=_processes(alone=read_only)
        )
        self._marked = _Marked()
        self._manager = None if read_only else self._writer(keep, keep_period, keep_best)

    def _writer(self, keep: int, keep_period: int | None, keep_best: int) -> ocp.CheckpointManager:
        hashing = _Hashing()
        policies: list[managers.PreservationPolicy] = [managers.LatestN(n=keep), self._marked]
        if keep_period is not None:
            policies.append(managers.EveryNSteps(keep_period))
        if keep_best:
            best = {"get_metric_fn": _measure, "reverse": True, "n": keep_best}
            policies.append(managers.BestN(**best, keep_checkpoints_without_metrics=False))
        return ocp.CheckpointManager(
            self.folder,
            item_names=("params", "optimizer", "groups", "average", "best", "note"),
            item_handlers={manifest.ITEM: hashing},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies),
                best_fn=_measure if keep_best else None,
                cleanup_tmp_directories=True,
                multiprocessing_options=_processes(alone=False),
                async_options=ocp.options.AsyncOptions(post_finalization_callback=hashing.finish),
            ),
        )

    @property
    def latest(self) -> int | None:
        """Last complete step, or None."""
        return latest_step(self._here)

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        note: Mapping[str, Any],
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to save a step; returns once the arrays may be overwritten.

        A step that is saved already stays as it is.

        Args:
            items: Name ("params", "optimizer", ...) -> tree of arrays.
            measured: Values measured with these parameters; with `MEASURE` the step may be one of
                the best.
        """
        assert self._manager is not None, "read-only"
        if step in self._manager.all_steps():
            return
        # A run resumes from the checkpoint: the files next to it must not be older. And no process
        # may write any shard once the folder is another job's.
        self._marked.steps = distributed.on_primary_then_broadcast(
            "to save a checkpoint", self._push_then_marked
        )
        saves: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_FILE_BYTES)
            for name, tree in items.items()
        }
        saves["note"] = ocp.args.JsonSave(dict(note))
        known = (measured or {}).get(MEASURE)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(**saves, **{manifest.ITEM: _HashAll()}),
                metrics=None if known is None else {MEASURE: float(known)},
            )

    def _push_then_marked(self) -> list[int]:
        upload(self._here)
        path = self.folder.parent / SCORES_BY_STEP
        try:
            rows = read_jsonl(path, record({"step": count, "best": flag}))
            return sorted({row["step"] for row in rows if row["best"]})
        except FileNotFoundError:
            return []
        except (OSError, InputError) as error:  # no reason to stop training
            print(f"{error}: cannot be read; the best step stays", file=sys.stderr)
            return list(self._marked.steps)

    def note(self, step: int) -> dict[str, Any]:
        """Returns the JSON note of a step."""
        with self._reading(step):
            args = ocp.args.Composite(note=ocp.args.JsonRestore())
            found = self._reader.restore(self.folder / str(step), args=args)["note"]
        with undamaged(f"{self.folder}/{step}/note"):
            _NOTE(found, "")
        return found

    def restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the named trees of a step; what is not named is not read.

        Args:
            items: Name -> tree of ShapeDtypeStructs.

        Raises:
            Removed: It went meanwhile.
            InputError: It has no such item, or cannot be read.
        """
        restores = {
            name: ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            )
            for name, tree in items.items()
        }
        with self._reading(step):
            if missing := items.keys() - manifest.items_of(self.folder / str(step)):
                raise InputError(
                    f"{self.folder}/{step}: has no {', '.join(sorted(missing))}: a run cannot "
                    "resume from it, but begin from it (--init_from)"
                )
            for name, tree in items.items():
                self.check_shapes(step, name, tree)
            found = self._reader.restore(
                self.folder / str(step), args=ocp.args.Composite(**restores)
            )
        return {name: found[name] for name in items}

    def used(self, step: int) -> str:
        """Returns the item whose parameters are used: best, average or params."""
        with self._reading(step):
            return used_item(manifest.items_of(self.folder / str(step)))

    def check_shapes(self, step: int, name: str, tree: Any) -> None:
        """Checks that an item of a step has the arrays of `tree` (nested dicts).

        To be called before `restore`, which would make floats of any numbers, and whose message
        about a shape has thousands of lines.

        Raises:
            InputError: An array has another shape, or no floats where the tree has.
        """
        there_is, tree_is = self.arrays(step, name), by_path(tree)
        saved = {path: tuple(leaf.shape) for path, leaf in there_is.items()}
        wanted = {path: tuple(leaf.shape) for path, leaf in tree_is.items()}
        for path in sorted(saved.keys() | wanted.keys()):
            here, there = wanted.get(path), saved.get(path)
            if here != there:
                raise InputError(
                    f"{self.folder}/{step}: {path} is {there or 'missing'} there and "
                    f"{here or 'missing'} in the model: it belongs to another config"
                )
            if is_float(tree_is[path].dtype) and not is_float(there_is[path].dtype):
                raise InputError(
                    f"{self.folder}/{step}: {path} has numbers of type {there_is[path].dtype}: "
                    "must be floats"
                )

    def arrays(self, step: int, name: str) -> dict[str, Any]:
        """Returns "a/b" -> shape, dtype and sharding of every array of an item."""
        return by_path(self._tree(step, name))

    def read(self, step: int, name: str) -> dict[str, np.ndarray]:
        """Returns "a/b" -> every array of an item, in this process's memory."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        tree = self._tree(step, name)
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)
        return {
            path: np.asarray(array)
            for path, array in by_path(self.restore(step, {name: wanted})[name]).items()
        }

    def _tree(self, step: int, name: str) -> Any:
        alone = _processes(alone=True)
        with self._reading(step), ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
            item = self.folder / str(step) / name
            found = reader.metadata(item).item_metadata
            if not item.exists():  # of which orbax finds no arrays
                raise FileNotFoundError(item)
            return found

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Makes one line of what orbax raises, also over a step that is as its manifest says."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # orbax raises anything over some files
            there = self.folder / str(step)
            said = manifest.problem(there)
            if is_removed(self._here, step, seconds=1.0 if said else 0.0):
                raise Removed(
                    f"{there}: was removed while it was read (Training.keep_checkpoints "
                    "sets how many are kept)"
                ) from error
            if said:
                raise InputError(f"{there}: damaged ({said})") from error
            raise InputError(
                f"{there}: cannot be read ({first_line(error)}); where it is damaged, "
                "remove it, and the step before is used"
            ) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns what the disk refuses into an OSError with the folder."""
        try:
            yield
        except (OSError, ValueError) as error:
            number = _refused(error)
            if number is None or getattr(error, "filename", None):
                raise
            raise OSError(number, os.strerror(number), os.fspath(self.folder)) from error

    def wait(self) -> None:
        """Returns when every save is on disk. OSError: the disk is full or fails."""
        if self._manager is not None:
            with self._writing():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and ends threads."""
        self._reader.close()
        if self._manager is not None:
            with self._writing():
                self._manager.close()


def read_note(folder: Path, step: int) -> dict[str, Any]:
    """Returns the note of a checkpoint in a model's folder. InputError: it is damaged."""
    there = address_of(folder / "checkpoints") / str(step)
    if (said := manifest.problem(there, {"note"})) is not None:
        raise InputError(f"{there}: damaged ({said})")
    with contextlib.closing(Checkpoints(folder / "checkpoints", read_only=True)) as store:
        return store.note(step)


class _Marked:
    """The rule, for orbax, that marked steps stay."""

    steps: Collection[int] = ()

    def should_preserve(
        self,
        checkpoints: Sequence[managers.PolicyCheckpointInfo],
        *,
        context: managers.PreservationContext,
    ) -> Sequence[bool]:
        return [one.step in self.steps for one in checkpoints]


def _quiet() -> None:
    """Silences orbax: it logs every save, and its threads print what `save` and `wait` raise."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_raised)
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _unraisable:
        sys.unraisablehook = functools.partial(_unraisable, before)


def _unraisable(before: Callable[[Any], object], found: Any) -> None:
    # tensorstore's writes end after the one that failed has closed orbax's event loop.
    if found.object is not None or "Event loop is closed" not in str(found.exc_value):
        before(found)


def _is_not_raised(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return error is None or (record.module not in _THREADS and _refused(error) is None)


def _refused(error: BaseException) -> int | None:
    """Returns the number of the disk's error that tensorstore's error quotes, or None."""
    return next((number for number in _OF_DISKS if os.strerror(number) in str(error)), None)


def _measure(measured: Mapping[str, float]) -> float:
    return measured[MEASURE]


def _processes(*, alone: bool) -> ocp.options.MultiprocessingOptions:
    """Returns which processes wait for each other: all, or none for this one."""
    if jax.process_count() == 1 or not alone:
        return ocp.options.MultiprocessingOptions()
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )


def by_path(tree: Any) -> dict[str, Any]:
    """Returns "a/b" -> every array of nested dicts."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


class _Hashing(ocp.AsyncCheckpointHandler):
    """Writes the manifest, as the item `sha256` of each step."""

    async def async_save(self, directory: epath.Path, args: ocp.args.CheckpointArgs) -> list[Any]:
        self._item = directory
        write_own = functools.partial(manifest.write_own, directory, jax.process_index())
        # orbax waits in the order of the items' names: for `sha256` when all others are written.
        return [future.ChainedFuture([], write_own)]

    def finish(self) -> None:
        """Writes the manifest, by the primary, when only the step's own name is missing."""
        manifest.write_whole(self._item.parent)

    def save(self, directory: epath.Path, args: ocp.args.CheckpointArgs) -> None:
        """Raises NotImplementedError: orbax's manager does not call it."""
        raise NotImplementedError("only async_save")

    restore = save


@ocp.args.register_with_handler(_Hashing, for_save=True, for_restore=True)
@dataclasses.dataclass
class _HashAll(ocp.args.CheckpointArgs):
    """Asks for the manifest of the step that is saved."""


def shapes(tree: Any, shardings: Any | None = None) -> Any:
    """Returns the ShapeDtypeStructs of a tree of arrays, with these shardings or their own."""

    def shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        own = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or own)

    return jax.tree.map(shape, tree, *([] if shardings is None else [shardings]))

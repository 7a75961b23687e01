"""Checkpoints: parameters, optimizer and a JSON note, atomically, by orbax (its only importer)."""

import contextlib
import dataclasses
import errno
import functools
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint import future

from m4.parallel import distributed
from m4.settings import InputError, first_line
from m4.storage import steps
from m4.storage.files import read_jsonl, undamaged
from m4.storage.local_copy import address_of, upload
from m4.storage.records import count, flag, named, record, text
from m4.storage.steps import is_removed, items_of, used_item, whole_step


class Removed(InputError):
    """The error of a step that was removed while it was read, as training keeps only the last."""


# File in a run's folder: the scores of its checkpoints by step (`m4 eval --watch`).
SCORES_BY_STEP = "scores_by_step.jsonl"
# Size of a file of arrays: small enough that several threads share the hashing.
_FILE_BYTES = 1 << 25
# Numbers of a disk's errors, and the modules of orbax that save in threads.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_THREADS = ("future", "async_checkpointer", "checkpoint_manager")
# Value measured at a checkpoint's step by which `keep_best` chooses; the lowest is the best.
MEASURE = "dev/nll"
# Kinds of the values in a step's note.
_SEEN = named(record({"pairs": count}))
_SEEN_OF = record({"from_step": count, "directions": _SEEN, "languages": _SEEN})
_NOTE = record(
    {
        **{"step?": count, "best_step?": count, "finished?": flag, "vocabulary?": text},
        **{"averaged?": named(text), "seen?": _SEEN_OF},
    }
)


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of a model, `checkpoints/<step>/`.

    A step has the items params, optimizer, groups, average, best and note. `average` has averaged
    parameters, if the optimizer makes them (`m4.train.average`), and `best` those of the best
    evaluation so far, if there is early stopping.

    With several processes, all open, save and restore together, but read-only ones each alone.

    Saving is asynchronous (call `wait` or `close` before reading) and atomic (`m4.storage.steps`).
    Whoever opens the folder for writing goes back to the last whole step (`whole_step`).
    """

    def __init__(
        self, folder: Path | str, keep: int = 3, keep_period: int | None = None, keep_best: int = 0,
        *, read_only: bool = False,
    ):  # fmt: skip
        """Opens a folder of checkpoints.

        A save removes all steps but the last `keep`, those that `keep_period` divides, the
        `keep_best` with the lowest `MEASURE`, and those marked as best in `SCORES_BY_STEP`.
        """
        _quiet()
        self._here = Path(folder).absolute()
        self.folder = address_of(self._here)
        self.latest: int | None = None  # last complete step when the folder was opened for writing
        self._manager = None
        if not read_only:
            self.latest = distributed.on_primary_then_broadcast(
                "checkpoints", lambda: whole_step(self._here, move_aside=True)
            )
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(), multiprocessing_options=_processes(alone=read_only)
        )
        if read_only:
            return
        self._marked: list[int] = []  # steps that `SCORES_BY_STEP` marks as best
        hashing, measure = _Hashing(), operator.itemgetter(MEASURE)
        # The first policy is that of the marked steps, which `save` replaces.
        marked, last = managers.CustomSteps(steps=[]), managers.LatestN(n=keep)
        self._policies: list[managers.PreservationPolicy] = [marked, last]
        if keep_period is not None:
            self._policies.append(managers.EveryNSteps(keep_period))
        if keep_best:
            best = {"get_metric_fn": measure, "reverse": True, "n": keep_best}
            self._policies.append(managers.BestN(**best, keep_checkpoints_without_metrics=False))
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=("params", "optimizer", "groups", "average", "best", "note"),
            item_handlers={steps.ITEM: hashing},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(self._policies),
                best_fn=measure if keep_best else None,
                cleanup_tmp_directories=True,
                multiprocessing_options=_processes(alone=False),
                async_options=ocp.options.AsyncOptions(post_finalization_callback=hashing.finish),
            ),
        )

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        note: Mapping[str, Any],
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving a step; returns once the arrays may be overwritten.

        An existing step is kept.

        Args:
            items: Name ("params", "optimizer", ...) -> tree of arrays.
            measured: Values measured with these parameters; with `MEASURE`, the step may be one of
                the best.
        """
        assert self._manager is not None, "read-only"
        if step in self._manager.all_steps():
            return
        # A run resumes from the checkpoint, so the files next to it must not be older. Besides, no
        # process may write a shard once the folder belongs to another job.
        self._marked = distributed.on_primary_then_broadcast(
            "to save a checkpoint", self._push_then_marked
        )
        self._policies[0] = managers.CustomSteps(steps=self._marked)
        saves: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_FILE_BYTES)
            for name, tree in items.items()
        }
        saves["note"] = ocp.args.JsonSave(dict(note))
        known = (measured or {}).get(MEASURE)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(**saves, **{steps.ITEM: _HashAll()}),
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
        except (OSError, InputError) as error:  # not a reason to stop training
            print(f"{error}: cannot be read; the best step stays", file=sys.stderr)
            return self._marked

    def note(self, step: int) -> dict[str, Any]:
        """Returns the JSON note of a step."""
        with self._reading(step):
            args = ocp.args.Composite(note=ocp.args.JsonRestore())
            found = self._reader.restore(self.folder / str(step), args=args)["note"]
        with undamaged(f"{self.folder}/{step}/note"):
            _NOTE(found, "")
        return found

    def restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the named trees of a step, without reading others.

        Args:
            items: Name -> tree of ShapeDtypeStructs.

        Raises:
            Removed: The step was removed meanwhile.
            InputError: The step has no such item, or cannot be read.
        """
        there, how = self.folder / str(step), ocp.checkpoint_utils.construct_restore_args
        with self._reading(step):
            if missing := items.keys() - items_of(there):
                said = "a run cannot resume from it, but can begin from it (--init_from)"
                raise InputError(f"{there}: has no {', '.join(sorted(missing))}: {said}")
            for name, tree in items.items():
                self.check_shapes(step, name, tree)
            asked = {
                name: ocp.args.PyTreeRestore(tree, restore_args=how(tree))
                for name, tree in items.items()
            }
            found = self._reader.restore(there, args=ocp.args.Composite(**asked))
        return {name: found[name] for name in items}

    def used(self, step: int) -> str:
        """Returns the item with the parameters to use: best, average or params."""
        with self._reading(step):
            return used_item(items_of(self.folder / str(step)))

    def check_shapes(self, step: int, name: str, tree: Any) -> None:
        """Checks that an item of a step has the arrays of `tree` (nested dicts).

        Raises:
            InputError: An array has another shape, or has no floats although that of `tree` has.
        """
        saved, wanted = self.arrays(step, name), by_path(tree)
        for path in sorted(saved.keys() | wanted.keys()):
            where, both = f"{self.folder}/{step}: {path}", (saved, wanted)
            there, here = (tuple(one[path].shape) if path in one else None for one in both)
            if here != there:
                raise InputError(
                    f"{where} is {there or 'missing'} there and {here or 'missing'} in the model: "
                    "it belongs to another config"
                )
            if _is_float(wanted[path].dtype) and not _is_float(kind := saved[path].dtype):
                raise InputError(f"{where} has numbers of type {kind}: must be floats")

    def arrays(self, step: int, name: str) -> dict[str, Any]:
        """Returns "a/b" -> shape, dtype and sharding of every array of an item."""
        return by_path(self._tree(step, name))

    def read(self, step: int, name: str) -> dict[str, np.ndarray]:
        """Returns "a/b" -> every array of an item, in this process's memory."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        tree = self._tree(step, name)
        wanted = shapes(tree, jax.tree.map(lambda _: here, tree))
        found = by_path(self.restore(step, {name: wanted})[name])
        return {path: np.asarray(array) for path, array in found.items()}

    def _tree(self, step: int, name: str) -> Any:
        alone = _processes(alone=True)
        with self._reading(step), ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
            item = self.folder / str(step) / name
            found = reader.metadata(item).item_metadata
            if not item.exists():  # orbax finds no arrays in it
                raise FileNotFoundError(item)
            return found

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns errors of orbax, also over a step that matches its manifest, into an InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # orbax raises anything over some files
            there = self.folder / str(step)
            said = steps.problem(there)
            if is_removed(self._here, step, seconds=1.0 if said else 0.0):
                how = "(Training.keep_checkpoints sets how many are kept)"
                raise Removed(f"{there}: was removed while it was read {how}") from error
            if said:
                raise InputError(f"{there}: damaged ({said})") from error
            remedy = "where it is damaged, remove it, and the step before is used"
            said = f"cannot be read ({first_line(error)}); {remedy}"
            raise InputError(f"{there}: {said}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of the disk into an OSError with the folder."""
        try:
            yield
        except (OSError, ValueError) as error:
            number = _refused(error)
            if number is None or getattr(error, "filename", None):
                raise
            raise OSError(number, os.strerror(number), os.fspath(self.folder)) from error

    def wait(self) -> None:
        """Waits until every save is on disk. Raises OSError if the disk is full or fails."""
        if self._manager is not None:
            with self._writing():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves and ends threads."""
        self._reader.close()
        if self._manager is not None:
            with self._writing():
                self._manager.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_note(folder: Path, step: int) -> dict[str, Any]:
    """Returns the note of a checkpoint in a model's folder. Raises InputError if damaged."""
    there = address_of(folder / "checkpoints") / str(step)
    if (said := steps.problem(there, lambda _: {"note"})) is not None:
        raise InputError(f"{there}: damaged ({said})")
    with Checkpoints(folder / "checkpoints", read_only=True) as store:
        return store.note(step)


def _quiet() -> None:
    """Silences orbax, which logs every save and prints errors that `save` and `wait` raise."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_raised)
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _unraisable:
        sys.unraisablehook = functools.partial(_unraisable, before)


def _unraisable(before: Callable[[Any], object], found: Any) -> None:
    # When a write of tensorstore fails, others end after orbax has closed its event loop.
    if found.object is not None or "Event loop is closed" not in str(found.exc_value):
        before(found)


def _is_not_raised(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return error is None or (record.module not in _THREADS and _refused(error) is None)


def _refused(error: BaseException) -> int | None:
    """Returns the error number of the disk in the message of tensorstore's error, or None."""
    return next((number for number in _OF_DISKS if os.strerror(number) in str(error)), None)


def _processes(*, alone: bool) -> ocp.options.MultiprocessingOptions:
    """Returns options by which all processes wait for each other or, if `alone`, for none."""
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
        write_own = functools.partial(steps.write_own, directory, jax.process_index())
        # orbax waits for items in the order of their names, so that `sha256` comes last.
        return [future.ChainedFuture([], write_own)]

    def finish(self) -> None:
        """Writes the manifest on the primary, just before the step gets its final name."""
        steps.write_whole(self._item.parent)

    def save(self, directory: epath.Path, args: ocp.args.CheckpointArgs) -> None:
        """Raises NotImplementedError, as orbax's manager never calls this method."""
        raise NotImplementedError("only async_save")

    restore = save


@ocp.args.register_with_handler(_Hashing, for_save=True, for_restore=True)
@dataclasses.dataclass
class _HashAll(ocp.args.CheckpointArgs):
    """Arguments by which orbax asks `_Hashing` for the manifest of the saved step."""


def shapes(tree: Any, shardings: Any | None = None) -> Any:
    """Returns the shapes of a tree of arrays, with these shardings or their own."""

    def shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        own = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or own)

    return jax.tree.map(shape, tree, *([] if shardings is None else [shardings]))


def _is_float(dtype: Any) -> bool:
    """Returns whether a dtype is floating-point, including bfloat16."""
    return jnp.issubdtype(dtype, jnp.floating)


def check_weights(where: object, arrays: Mapping[str, Any]) -> None:
    """Checks parameters or moments of an optimizer; for JAX arrays, this process's shards.

    Raises:
        InputError: An array is not of floats, or has values that are not finite.
    """
    for name, array in arrays.items():
        if not _is_float(array.dtype):
            raise InputError(f"{where}: {name} has numbers of type {array.dtype}: must be floats")
        parts = [array]
        if isinstance(array, jax.Array):  # devices with the same shard have the same index
            parts = {str(one.index): one.data for one in array.addressable_shards}.values()
        if wrong := sum(int(np.size(p) - np.isfinite(np.asarray(p)).sum()) for p in parts):
            raise InputError(f"{where}: {name} has {wrong:,} values that are not finite")

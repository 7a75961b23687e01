"""`m4 average`: makes a run folder with the mean of several checkpoints' parameters.

The mean of the last checkpoints often translates better than the last one (Vaswani et al. 2017,
section 6.1: the last 5). `m4.train.average` is another mean: over all steps, during training.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m4.build import build
from m4.eval.decoding.inference_checkpoint import restore_params
from m4.experiment import Experiment
from m4.jobs.corpus import keep_vocabulary, open_vocabulary, place_of
from m4.jobs.decoding.testsets import trained_step
from m4.settings import InputError, counted
from m4.storage.checkpoints import Checkpoints, read_note
from m4.storage.steps import complete_steps, digest, latest_step, whole_step

# Key of a note's entry on what was averaged. Such a checkpoint has no optimizer state.
AVERAGED = "averaged"
# Keys of the last step's note that only its own training needs.
_NOT_KEPT = ("sampling", "best_step", "best", "risen_to", "since_best", "metrics")


def chosen_steps(folder: Path, last: int | None, steps: Sequence[int] | None) -> list[int]:
    """Returns the steps to average: the given ones, or the last ones of a run."""
    if steps is None:
        trained_step(folder)  # raises if there is no checkpoint
        there = complete_steps(folder / "checkpoints")
        steps = there[-last:] if last is not None else there
        if last is not None and len(there) < last:
            said = f"--last={last} of {counted(len(there), 'checkpoint')} that stayed"
            print(f"{said} (Training.keep_checkpoints sets how many stay)", file=sys.stderr)
    if len(steps) < 2:
        raise InputError(f"{folder}: {len(steps)} checkpoint; a mean is of two or more")
    return [trained_step(folder, step) for step in steps]


def bindings(experiment: Experiment, folder: Path) -> list[str]:
    """Returns additional bindings of the mean's config: the places of corpus and baselines."""
    said = [f"experiment.Data.data_dir = {place_of(experiment)!r}"]
    if (levels := experiment.baselines) is not None and levels.folder is None:
        said.append(f"experiment.Baselines.folder = {str(folder / 'baselines')!r}")
    return said


def average(experiment: Experiment, output: Experiment, steps: Sequence[int]) -> None:
    """Saves the mean of the steps' parameters in the folder of `output`, unless it exists."""
    run, folder = experiment.folder, output.folder
    of = {str(step): digest(run / "checkpoints", step) for step in steps}
    if (latest := latest_step(folder / "checkpoints")) is not None:
        try:
            whole_step(folder / "checkpoints", latest)
        except InputError as error:
            raise InputError(f"{error}; remove it, and the mean is made again") from error
        if read_note(folder, latest).get(AVERAGED) != of:
            raise InputError(f"{folder}: has the mean of other checkpoints; give another --output")
        return
    cache = open_vocabulary(experiment)
    parts = build(experiment, cache)
    model, layout = parts.model, parts.layout_or_first_device("m4 average")
    notes: list[dict[str, Any]] = []

    def params() -> Iterable[Any]:
        for step in steps:
            at = run / "checkpoints", step, cache.vocabulary
            tree, _, note = restore_params(model, *at, layout, item="params")
            notes.append(note)
            yield tree

    keep_vocabulary(output, cache)
    with Checkpoints(folder / "checkpoints") as store:
        made = mean(params())
        note = {name: value for name, value in notes[-1].items() if name not in _NOT_KEPT}
        store.save(steps[-1], {"params": made}, {**note, AVERAGED: of, "finished": True})


def mean(trees: Iterable[Any]) -> Any:
    """Returns the mean of equally shaped trees, in float64, rounded once to each array's type.

    Arrays are sharded like the last tree's; host memory holds the sum of each shard once.
    """
    totals: list[dict[str, np.ndarray]] = []
    count, leaves, structure = 0, [], None
    for tree in trees:
        leaves, structure = jax.tree.flatten(tree)
        totals = totals or [{} for _ in leaves]
        for total, leaf in zip(totals, leaves, strict=True):
            # Devices that hold the same shard have the same index.
            for index, part in {str(s.index): s.data for s in leaf.addressable_shards}.items():
                total[index] = total.get(index, 0) + np.asarray(part, np.float64)
        count += 1
    assert structure is not None
    made = []
    for total, leaf in zip(totals, leaves, strict=True):
        parts = {index: (sums / count).astype(leaf.dtype) for index, sums in total.items()}
        shards = [jax.device_put(parts[str(s.index)], s.device) for s in leaf.addressable_shards]
        made.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards))
    return jax.tree.unflatten(structure, made)

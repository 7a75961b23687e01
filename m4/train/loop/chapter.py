"""The state at the beginning of a chapter: what of the last checkpoint fits the changed config."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from m4.storage import manifest
from m4.storage.checkpoints import Checkpoints, by_path, shapes
from m4.train import average, initial
from m4.train.initial import Rows
from m4.train.loop.program import TrainProgram
from m4.train.state import TrainState

_Pairs = set[tuple[int, int]]


def next_state(
    checkpoints: Checkpoints,
    step: int,
    program: TrainProgram,
    rows: Callable[[str], Rows],
    *,
    same: bool,
    same_groups: bool,
) -> tuple[TrainState, str]:
    """The state after `step` for a program with another optimizer, or a grown vocabulary.

    Where the arrays of the optimizer's state are the saved ones, or have grown as the parameters
    have, it is kept; else it begins from zero, its learning rate at the same step.

    Args:
        rows: path of an embedding -> how its rows come from the old ones. same: as they are.
        same_groups: of directions, so that what is known of them is kept.

    Returns:
        The state, and what became of the optimizer's, in words.

    Raises:
        ValueError: a parameter has another shape than a vocabulary can explain.
    """
    abstract = program.abstract_state()
    wanted = average.items(abstract)
    items = manifest.items_of(checkpoints.folder / str(step)) & {*wanted}
    there = {name: _shapes(checkpoints.arrays(step, name)) for name in items}
    sizes = _grown(wanted["params"], there["params"])
    keep = [name for name in wanted if name in ("optimizer", "average")]
    fits = all(
        name in there and _fits(_shapes(by_path(wanted[name])), there[name], sizes) for name in keep
    )
    names = ["params", *(keep if fits else [])]
    groups = _shapes(by_path(wanted.get("groups", {})))
    if fits and same_groups and groups and groups == there.get("groups"):
        names.append("groups")
    found = checkpoints.restore(
        step, {name: _as_saved(wanted[name], there[name], program) for name in names}
    )
    if sizes or not same:
        found = _grow(found, program, rows)
    at = jax.device_put(np.asarray(step, np.int32), program.shardings.step)
    fresh = abstract.optimizer
    if not fits or (groups and "groups" not in found):
        with program.axis_rules():
            begin = jax.jit(program.optimizer.init, out_shardings=program.shardings.optimizer)
            fresh = begin(found["params"])
    if fits:
        return average.from_items(at, found, fresh), "kept" + ", grown" * bool(sizes)
    return TrainState(at, found["params"], _at_step(fresh, step)), "from zero: it has other arrays"


def _grow(
    found: dict[str, Any], program: TrainProgram, rows: Callable[[str], Rows]
) -> dict[str, Any]:
    """The restored trees in the shapes of the program: of parameters and their averages the rows of
    each piece, of the optimizer's statistics the first ones, and what is new as it starts."""
    fresh = program.new_state()
    old, new = initial.shapes_of(found["params"]), initial.shapes_of(fresh.params)
    leaves = initial.plan(old, new, None)

    def take(params: Any, start: TrainState) -> Any:
        return initial.take_over(leaves, params, start.params, rows, {})

    def make(found: dict[str, Any], start: TrainState) -> dict[str, Any]:
        begun = average.items(start)
        made = {name: take(found[name], start) for name in found if name != "optimizer"}
        if "optimizer" in found:
            made["optimizer"] = jax.tree.map(_padded, found["optimizer"], begun["optimizer"])
        return made

    placed = average.items(program.shardings)
    with program.axis_rules():
        return jax.jit(make, out_shardings={name: placed[name] for name in found})(found, fresh)


def _padded(old: jax.Array, new: jax.Array) -> jax.Array:
    if old.shape == new.shape:
        return old
    return new.at[tuple(slice(size) for size in old.shape)].set(old)


def _grown(params: Any, saved: Mapping[str, tuple[int, ...]]) -> _Pairs:
    """The sizes (before, now) of the axes of parameters that have grown."""
    return {
        (before, now)
        for path, shape in _shapes(by_path(params)).items()
        for before, now in zip(saved.get(path, ()), shape, strict=False)
        if before < now
    }


def _fits(
    wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], grown: _Pairs
) -> bool:
    return wanted.keys() == saved.keys() and all(
        len(shape) == len(saved[path])
        and all(
            now == before or (before, now) in grown
            for before, now in zip(saved[path], shape, strict=True)
        )
        for path, shape in wanted.items()
    )


def _as_saved(tree: Any, saved: Mapping[str, tuple[int, ...]], program: TrainProgram) -> Any:
    """Shapes as they were saved; arrays that have grown are on every device for now."""
    everywhere = NamedSharding(program.mesh, PartitionSpec())

    def one(path: Any, leaf: Any) -> Any:
        shape = saved.get(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
        if shape == leaf.shape:
            return leaf
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=everywhere)

    return jax.tree_util.tree_map_with_path(one, shapes(tree))


def _shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in arrays.items()}


def _at_step(state: Any, step: int) -> Any:
    """An optimizer's first state, but for its learning rate, which is a function of the step."""

    def schedules(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def one(node: Any) -> Any:
        if not schedules(node):
            return node
        count = np.asarray(step, node.count.dtype)
        return optax.ScaleByScheduleState(jax.device_put(count, node.count.sharding))

    return jax.tree.map(one, state, is_leaf=schedules)

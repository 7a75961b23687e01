"""Bytes of a device by kind: a program's arguments, and what it needs in addition."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
from flax.core import unfreeze
from flax.linen import partitioning
from jax.sharding import PartitionSpec

from m4.plan.program import PlannedProgram
from m4.train.measuring.metric_window import shown_layers

KINDS = (
    "replicated weights",
    "expert weights",
    "optimizer state",
    "batch",
    "temporaries",
    "code",
    "counts and log rows",
)
# Metrics of a step that training sums up on the device over the whole run.
_SUMMED = ("expert_loads", "data_counts")


class State(Protocol):
    """Shapes of parameters and of an optimizer's state (None: there is none), with shardings."""

    @property
    def params(self) -> Any: ...
    @property
    def params_axes(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...


def counts(program: State) -> dict[str, int]:
    """Parameters over all devices by kind: experts, embeddings, routers, attention, the rest."""
    found: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.params)[0]:
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        kind = _kind(names)
        found[kind] = found.get(kind, 0) + math.prod(leaf.shape)
    return found


def _kind(names: list[str]) -> str:
    if "experts" in names:
        return "experts"
    if any("embedder" in name for name in names) or "logits_dense" in names:
        return "embeddings and logits"
    if any("attention" in name and "norm" not in name for name in names):
        return "attention"
    if "mlp" in names:
        return "dense feed-forward"
    return "routers, norms, biases"


def given(program: State) -> dict[str, int]:
    """Bytes a device of the program's weights and optimizer state, by their shardings, unpadded.

    "replicated weights" are all but the experts', also where `Training.fsdp_axes` or the mesh axis
    fsdp shards them.
    """
    axes = unfreeze(partitioning.get_axis_names(program.params_axes))
    leaves = jax.tree.leaves(program.params)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert len(leaves) == len(names)
    weights = {True: 0, False: 0}
    for leaf, spec in zip(leaves, names, strict=True):
        weights["expert" in tuple(spec)] += shard_bytes(leaf)
    state = jax.tree.leaves(program.optimizer)
    return {
        "replicated weights": weights[False],
        "expert weights": weights[True],
        "optimizer state": sum(map(shard_bytes, state)),
    }


def shard_bytes(leaf: Any) -> int:
    """Bytes of one device's shard of an array or shape."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def kept(program: PlannedProgram) -> int:
    """Bytes a device of what training keeps from step to step apart from the state: one sum of the
    counts by direction and expert, and the other metrics of all steps since the last log row.

    The compiler counts those of one step, among the temporaries.
    """
    if program.metrics is None:
        return 0
    metrics = {**program.metrics, "layers": shown_layers(program.metrics["layers"])}
    once, each = 0, 0
    for name, tree in metrics.items():
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        once, each = (once + size, each) if name in _SUMMED else (once, each + size)
    return once + each * program.log_period


def by_kind(given: Mapping[str, int], stats: Any, kept: int) -> dict[str, int]:
    """`KINDS` -> bytes a device, of a compiled program's `memory_analysis()`.

    kept: see `kept`.

    The result of a training step replaces its arguments; results that do not are temporaries here.
    "batch" includes the padding of all arguments.
    """
    added = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {
        **given,
        "batch": max(0, stats.argument_size_in_bytes - sum(given.values())),
        "temporaries": stats.temp_size_in_bytes + max(0, added),
        "code": stats.generated_code_size_in_bytes,
        "counts and log rows": kept,
    }

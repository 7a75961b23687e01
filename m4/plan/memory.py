"""Memory of a device by kind, and a program that does not fit.

The latter gives the compiler's message in one line, and the changes that would help.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import unfreeze
from flax.linen import partitioning
from jax.sharding import PartitionSpec

from m4.model.transformer import Transformer, abstract_variables
from m4.plan.machines import GIB
from m4.plan.program import PlannedProgram
from m4.train.measuring.counters import shown_layers

KINDS = (
    "replicated weights",
    "expert weights",
    "optimizer state",
    "batch",
    "temporaries",
    "code",
    "counts and log rows",
)
# "... required for HLO temporaries (20.31G) exceeds available HBM (15.48G)";
# "Used 24.00G of 15.48G hbm".
_NEEDED = (
    re.compile(r"required for HLO (\w+) \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)"),
    re.compile(r"(Used) ([\d.]+)([KMGT]) of ([\d.]+)[KMGT] hbm"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Metrics of a step that training sums up on the device over the whole run.
_SUMMED = ("expert_loads", "data_counts")


def counts(params: Any) -> dict[str, int]:
    """Counts the parameters of all devices by kind: experts, embeddings, attention, the rest."""
    found: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
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
    if "mlp" in names or "shared" in names:
        return "dense feed-forward"
    return "routers, norms, biases"


def given(model: Transformer, params: Any, optimizer: Any) -> dict[str, int]:
    """Returns bytes a device of weights and optimizer state, by their shardings, unpadded.

    "replicated weights" are all but the experts', also where fsdp shards them.
    """
    axes = unfreeze(partitioning.get_axis_names(abstract_variables(model)["params_axes"]))
    leaves = jax.tree.leaves(params)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert len(leaves) == len(names)
    weights = {True: 0, False: 0}
    for leaf, spec in zip(leaves, names, strict=True):
        weights["expert" in tuple(spec)] += shard_bytes(leaf)
    state = jax.tree.leaves(optimizer)
    return {
        "replicated weights": weights[False],
        "expert weights": weights[True],
        "optimizer state": sum(map(shard_bytes, state)),
    }


def shard_bytes(leaf: Any) -> int:
    """Returns the bytes of one device's shard of an array or shape."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def kept(program: PlannedProgram) -> int:
    """Returns the bytes a device that training keeps from step to step apart from the state.

    They are one sum of the counts by direction and expert, and the other metrics of all steps since
    the last log row.
    """
    if program.optimizer is None:
        return 0
    metrics = program.traced.out_info[1]
    metrics = {**metrics, "layers": shown_layers(metrics["layers"])}
    once, each = 0, 0
    for name, tree in metrics.items():
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        once, each = (once + size, each) if name in _SUMMED else (once, each + size)
    return once + each * program.parts.training.log_period


def by_kind(given: Mapping[str, int], stats: Any, kept: int) -> dict[str, int]:
    """Returns `KINDS` -> bytes a device, from `given`, `memory_analysis()` and `kept`.

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


def out_of_memory(message: str, helps: list[str]) -> dict[str, Any] | None:
    """Reads a compiler's message; returns None where it is another error.

    needed_bytes and available_bytes are None where the message has none.
    """
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    first = next(line.strip() for line in message.splitlines() if line.strip())
    first = first.removeprefix("RESOURCE_EXHAUSTED: ").split(" Please ")[0]
    needed = available = None
    for pattern in _NEEDED:
        if found := pattern.search(message):
            needed = int(float(found[2]) * _UNITS[found[3]])
            available = int(float(found[4]) * GIB)
            break
    return {"message": first, "needed_bytes": needed, "available_bytes": available, "advice": helps}


def too_much(by_kind: Mapping[str, int], available: int, helps: list[str]) -> dict[str, Any]:
    """Returns the same facts for a compiled program whose bytes exceed a device's."""
    needed = sum(by_kind.values())
    most = max(by_kind, key=lambda kind: by_kind[kind])
    return {
        "message": (
            f"{needed / GIB:.2f} GiB, most of them {most} ({by_kind[most] / GIB:.2f}), exceed the "
            f"memory ({available / GIB:.2f} GiB)"
        ),
        "needed_bytes": needed,
        "available_bytes": available,
        "advice": helps,
    }


def training_advice(model: Transformer, given: Mapping[str, int]) -> list[str]:
    """Returns changes of a config that reduce a training step's memory, the most useful first."""
    # Replicated weights have gradients of the same size.
    found = {
        "recompute activations in the backward pass: transformer.Transformer.remat = 'full'": (
            model.remat != "full"
        ),
        "a smaller batch: half of BATCH_SIZE halves the activations": True,
        "smaller groups: half of moe.MoeLayer.group_tokens halves the masks of dispatch": (
            model.moe is not None
        ),
        "activations of half the size: transformer.Transformer.dtype = 'bfloat16' (GShard's deep "
        "models were unstable with it)": jnp.dtype(model.dtype) != jnp.bfloat16,
        "one block at a time: transformer.Transformer.scan_layers = True": not model.scan_layers,
    }
    sharding = _sharding_advice(2 * given["replicated weights"], "weights and gradients")
    return [*sharding, *(advice for advice, fits in found.items() if fits)]


def decoding_advice(
    model: Transformer, given: Mapping[str, int], rows: int, beams: int
) -> list[str]:
    """Returns changes of a config that reduce a beam search's memory, the most useful first."""
    found = _sharding_advice(given["replicated weights"], "weights")
    if model.encoder_experts and model.encoder_experts.eval_capacity_factor is None:
        found.append(
            "fewer slots of the encoder's experts: moe.MoeLayer.eval_capacity_factor = 2.0; with "
            "None each expert has a slot for every token, and none is dropped"
        )
    if model.decoder_experts and model.decoder_experts.decode_capacity_factor is None:
        found.append("fewer slots of the decoder's experts: moe.MoeLayer.decode_capacity_factor")
    found += [
        f"fewer rows a batch: experiment.Decoding.batch_rows, {rows} over all devices here; at "
        "least one on each device that has different rows",
        "shorter sources: experiment.Decoding.max_source_length; longer ones are cut",
    ]
    if beams > 1:
        found.append(
            f"fewer hypotheses: experiment.Decoding.beams, {beams} here; each has its own keys and "
            "values"
        )
    if jnp.dtype(model.dtype) != jnp.bfloat16:
        found.append(
            "activations, keys and values of half the size: transformer.Transformer.dtype = "
            "'bfloat16'"
        )
    return found


def _sharding_advice(less: int, what: str) -> list[str]:
    """Returns the advice to shard the weights, where it saves enough of a device's bytes."""
    if less <= GIB / 4:
        return []
    return [
        "sharded weights (ZeRO): experiment.Training.fsdp_axes = ('expert',), or without experts "
        "mesh.make_mesh.fsdp, a number that divides the widths: up to "
        f"{less / GIB:.1f} GiB a device less, {what}"
    ]

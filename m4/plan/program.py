"""The program of a training step or of decoding, and its share of a device's memory.

Devices need not be present: programs are made from shapes, and vocabularies have the sizes that
the config asks for.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from m4.build import Parts, build
from m4.data.languages import LANGUAGES
from m4.data.stream.batches import DECODER_KEYS, ENCODER_KEYS
from m4.eval.decoding.decode import target_limit
from m4.eval.decoding.search import jit_over, search, search_batch
from m4.experiment import Experiment
from m4.model.layers import names_of
from m4.parallel.mesh import logical_spec
from m4.parallel.platform.machines import GIB
from m4.settings import InputError
from m4.train.measuring.counters import shown_layers


class PlannedProgram(NamedTuple):
    """A program before compilation, and its sizes."""

    parts: Parts  # parts of the experiment
    traced: Any  # the traced program, a stage of JAX
    lowered: Any  # The lowered program, with `.compile()`.
    params: Any  # shapes and shardings of the parameters
    optimizer: Any  # Shapes and shardings of the optimizer's state, or None for decoding.
    # Size of a batch over all devices: rows and pieces.
    rows: int
    source_length: int
    target_length: int
    beams: int = 1  # Hypotheses per sentence in decoding; 1 in training.


def planned(experiment: Experiment, languages: int, devices: Sequence[Any] | None = None) -> Parts:
    """Returns the parts of an experiment without a corpus, on `devices` (default: all here)."""
    if not 1 <= languages <= len(LANGUAGES):
        raise InputError(f"--languages={languages}: must be from 1 to {len(LANGUAGES)}")
    make = experiment.training.mesh
    return build(
        experiment,
        None,
        languages=list(LANGUAGES)[:languages],
        make_mesh=make if devices is None else functools.partial(make, devices=devices),
    )


def train_program(experiment: Experiment, devices: Sequence[Any], languages: int) -> PlannedProgram:
    """Returns the training step of `m4 train` with its shardings."""
    parts, lengths = planned(experiment, languages, devices), experiment.data.corpus.lengths
    sizes = experiment.training.batch_size, lengths["inputs"], lengths["targets"]
    rows = NamedSharding(parts.mesh, logical_spec(("batch",)))
    batch = {}  # fields of the stream's batches (`m4.data.stream.batches.lay_out`)
    for keys, width in zip((ENCODER_KEYS, DECODER_KEYS), sizes[1:], strict=True):
        for key in keys:
            dtype = jnp.float32 if "weights" in key else jnp.int32
            batch[key] = jax.ShapeDtypeStruct((sizes[0], width), dtype, sharding=rows)
    with parts.program.axis_rules():
        state = parts.program.abstract_state()
        traced = parts.program.jit().trace(state, batch)
        lowered = traced.lower()
    return PlannedProgram(parts, traced, lowered, state.params, state.optimizer, *sizes)


def decode_program(
    experiment: Experiment, devices: Sequence[Any], languages: int
) -> PlannedProgram:
    """Returns the beam search of `m4 decode` on a batch of the longest sources.

    A batch has `Decoding.batch_rows` sentences, rounded up to a multiple of the mesh's shards.
    """
    parts, settings = planned(experiment, languages, devices), experiment.decoding
    model, layout, params = parts.model, parts.layout(), parts.placed_params()
    length = settings.max_source_length
    rows = settings.batch_rows if layout is None else layout.rows(settings.batch_rows)
    options = target_limit(length, settings), settings.beams, settings.alpha
    with contextlib.nullcontext() if layout is None else layout.axis_rules():
        sharding: Any = SingleDeviceSharding(devices[0])
        if layout is not None:
            sharding = NamedSharding(layout.mesh, logical_spec(("batch",)))
        struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=sharding)
        batch = {"encoder_input_tokens": struct((rows, length))}
        if model.by_task:
            batch["direction_B"] = struct((rows,))
        if layout is None:
            traced = search.trace(model, params, batch, *options)
        else:
            traced = jit_over(layout, search_batch, model, *options).trace(params, batch)
        lowered = traced.lower()
    return PlannedProgram(parts, traced, lowered, params, None, rows, length, *options[:2])


# Metrics of a step that training sums on the device over the whole run.
_SUMMED = ("expert_loads", "data_counts")


def parameter_counts(params: Any) -> dict[str, int]:
    """Counts parameters over all devices by kind: experts, embeddings, attention, the rest."""
    found = Counter[str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found[_kind(names_of(path))] += math.prod(leaf.shape)
    return dict(found)


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


def given_bytes(params: Any, optimizer: Any) -> dict[str, int]:
    """Returns bytes per device of weights and optimizer state, by shardings, without padding.

    "replicated weights" are all but the experts', even if fsdp shards them.
    """
    found = {"replicated weights": 0, "expert weights": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_expert = _kind(names_of(path)) == "experts"
        found["expert weights" if is_expert else "replicated weights"] += shard_bytes(leaf)
    return {**found, "optimizer state": sum(map(shard_bytes, jax.tree.leaves(optimizer)))}


def shard_bytes(leaf: Any) -> int:
    """Returns the bytes of one device's shard of an array or a shape."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def kept_bytes(program: PlannedProgram) -> int:
    """Returns the bytes per device that training keeps besides the state: metrics of steps.

    These are one sum of counts by direction and expert, and others since the last log row.
    """
    if program.optimizer is None:
        return 0
    metrics = program.traced.out_info[1]
    metrics = {**metrics, "layers": shown_layers(metrics["layers"])}
    log_rows = program.parts.experiment.training.log_period
    return sum(
        leaf.size * leaf.dtype.itemsize * (1 if name in _SUMMED else log_rows)
        for name, tree in metrics.items()
        for leaf in jax.tree.leaves(tree)
    )


def bytes_by_kind(given: Mapping[str, int], stats: Any, kept: int) -> dict[str, int]:
    """Returns kind -> bytes per device, from `given`, `memory_analysis()` and `kept`.

    The result of a training step replaces its arguments; other results count as temporaries.
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


def out_of_memory(message: str) -> str | None:
    """Returns a compiler's message about memory in one line, or None for another error."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    first = next(line.strip() for line in message.splitlines() if line.strip())
    return first.removeprefix("RESOURCE_EXHAUSTED: ").split(" Please ")[0]


def too_much(by_kind: Mapping[str, int], available: int) -> str:
    """Returns such a message for a compiled program that exceeds a device's bytes."""
    needed = sum(by_kind.values())
    most = max(by_kind, key=lambda kind: by_kind[kind])
    return (
        f"{needed / GIB:.2f} GiB, most of them {most} ({by_kind[most] / GIB:.2f}), exceed the "
        f"memory ({available / GIB:.2f} GiB)"
    )


def advice(program: PlannedProgram, given: Mapping[str, int]) -> list[str]:
    """Returns changes of the config that reduce a program's memory, the most useful first."""
    model, training = program.parts.model, program.optimizer is not None
    # In training, replicated weights have gradients of the same size.
    less = (1 + training) * given["replicated weights"]
    drops = model.moe is None or None not in (
        getattr(model.encoder_experts, "eval_capacity_factor", 0),
        getattr(model.decoder_experts, "decode_capacity_factor", 0),
    )
    shared = f"up to {less / GIB:.1f} GiB a device less"
    found = (
        (less > GIB / 4, f"experiment.Training.fsdp_axes = ('expert',): sharded weights, {shared}"),
        (training and model.remat != "full", "transformer.Transformer.remat = 'full'"),
        (training, "half of BATCH_SIZE: half of the activations"),
        (training and model.moe is not None, "half of moe.MoeLayer.group_tokens: smaller masks"),
        (jnp.dtype(model.dtype) != jnp.bfloat16, "transformer.Transformer.dtype = 'bfloat16'"),
        (training and not model.scan_layers, "transformer.Transformer.scan_layers = True"),
        (not (training or drops), "moe.MoeLayer.eval_capacity_factor, decode_capacity_factor"),
        (not training, f"fewer rows than experiment.Decoding.batch_rows, {program.rows} here"),
        (not training, "a smaller experiment.Decoding.max_source_length"),
        (not training and program.beams > 1, f"fewer experiment.Decoding.beams: {program.beams}"),
    )
    return [said for helps, said in found if helps]

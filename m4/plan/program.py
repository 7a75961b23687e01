"""The program of a training step, or of decoding, for devices that need not be present.

Nothing is computed and no corpus is read: shapes alone go in. Vocabularies have the sizes that the
config asks for.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from m4.build import Parts, build
from m4.data.languages import LANGUAGES
from m4.data.stream.batches import DECODER_KEYS, ENCODER_KEYS
from m4.eval.decoding.decode import target_limit
from m4.eval.decoding.search import jit_search, search
from m4.experiment import Experiment
from m4.parallel.mesh import logical_spec
from m4.settings import InputError


class PlannedProgram(NamedTuple):
    """A program before its compilation, and its sizes."""

    parts: Parts  # the experiment's parts
    traced: Any  # the traced program, as JAX's stages have it
    lowered: Any  # The program; `.compile()` compiles it.
    params: Any  # shapes and shardings of the parameters
    optimizer: Any  # Shapes and shardings of the optimizer's state; None in decoding.
    # Size of a batch over all devices, in rows and pieces.
    rows: int
    source_length: int
    target_length: int
    beams: int = 1  # Hypotheses of a sentence in decoding; 1 in training.


def planned(experiment: Experiment, languages: int, devices: Sequence[Any] | None = None) -> Parts:
    """Returns the parts of an experiment without its corpus.

    Args:
        devices: Devices of the mesh. Defaults to all that are here.
    """
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
    """Returns the step of `m4 train`: the function that training compiles, with its shardings."""
    parts, lengths = planned(experiment, languages, devices), experiment.data.corpus.lengths
    sizes = experiment.training.batch_size, lengths["inputs"], lengths["targets"]
    with parts.program.axis_rules():
        state = parts.program.abstract_state()
        traced = parts.program.jit().trace(state, _batch(parts.mesh, *sizes))
        lowered = traced.lower()
    return PlannedProgram(parts, traced, lowered, state.params, state.optimizer, *sizes)


def decode_program(
    experiment: Experiment, devices: Sequence[Any], languages: int
) -> PlannedProgram:
    """Returns the beam search of `m4 decode` for a batch of the longest sources.

    A batch has `Decoding.batch_rows` sentences, rounded up to a multiple of the mesh's shards.
    """
    parts = planned(experiment, languages, devices)
    model, layout = parts.model, parts.layout()
    settings = experiment.decoding
    source_length, rows = settings.max_source_length, settings.batch_rows
    target_length = target_limit(source_length, settings.max_target_length)
    options = target_length, settings.beams, settings.alpha
    params = parts.placed_params()
    if layout is None:
        one = SingleDeviceSharding(devices[0])
        tokens_BL = jax.ShapeDtypeStruct((rows, source_length), jnp.int32, sharding=one)
        more = {"direction_B": jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=one)}
        given = {"more": more} if model.by_task else {}
        traced = search.trace(model, params, tokens_BL, *options, **given)
        lowered = traced.lower()
    else:
        rows = layout.rows(rows)
        with layout.axis_rules():
            tokens_BL = _rows(layout.mesh, (rows, source_length), jnp.int32)
            batch = {"encoder_input_tokens": tokens_BL}
            if model.by_task:
                batch["direction_B"] = _rows(layout.mesh, (rows,), jnp.int32)
            traced = jit_search(layout, model, *options).trace(params, batch)
            lowered = traced.lower()
    sizes = rows, source_length, target_length, settings.beams
    return PlannedProgram(parts, traced, lowered, params, None, *sizes)


def _batch(mesh: Mesh, rows: int, source_length: int, target_length: int) -> dict[str, Any]:
    """Returns a batch of the stream (`m4.data.stream.batches.lay_out`), as shapes on the mesh."""
    widths = {ENCODER_KEYS: source_length, DECODER_KEYS: target_length}
    return {
        key: _rows(mesh, (rows, width), jnp.float32 if key == "decoder_loss_weights" else jnp.int32)
        for keys, width in widths.items()
        for key in keys
    }


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, logical_spec(("batch",)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

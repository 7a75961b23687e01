"""The real program of a training step, or of decoding, for devices that need not be there.

Nothing is computed and no corpus is read: shapes alone go in. What the corpus would decide is taken
from the config: the vocabularies have the sizes that it asks for.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from m4.data.directions import directions_of
from m4.data.languages import LANGUAGES
from m4.data.sources import Pair
from m4.data.stream.batches import DECODER_KEYS, ENCODER_KEYS
from m4.eval.decoding.decode import target_limit
from m4.eval.decoding.search import jit_search, search
from m4.experiment import (
    Setup,
    corpus_settings,
    instead_of_training,
    model_of,
    translation_layout,
)
from m4.model.moe import shapes_only
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.mesh import logical_spec
from m4.train import loop
from m4.train.state import TrainState, initialize, state_shardings

# Where a job would write; a plan writes nothing there.
_NOWHERE = "nowhere"


class PlannedProgram(NamedTuple):
    """A program before its compilation, and what it is about.

    Attributes:
        lowered: `.compile()` makes the program. jaxpr: what it was made of.
        model: as the config has it. params: shapes and shardings of the parameters.
        optimizer: the same of the optimizer's state; None in decoding.
        rows, source_length, target_length: of a batch over all devices, in rows and pieces.
        beams: of decoding; 1 in training. directions: of translation.
    """

    lowered: Any
    jaxpr: Any
    model: Transformer
    params: Any
    params_axes: Any
    optimizer: Any
    rows: int
    source_length: int
    target_length: int
    beams: int
    directions: int


class _Unread:
    """A source that has languages and no text."""

    def __init__(self, languages: Sequence[str]) -> None:
        self._languages = list(languages)

    def languages(self) -> list[str]:
        return self._languages

    def pairs(self, language: str, split: str) -> Iterator[Pair]:
        raise AssertionError("a plan reads no corpus")

    def identity(self) -> dict[str, Any]:
        raise AssertionError("a plan reads no corpus")


def planned_model(setup: Setup, languages: int) -> tuple[Transformer, list[str]]:
    """The model and the directions; so many languages where the config names none.

    Raises:
        ValueError: more languages than m4 knows.
    """
    if not 1 <= languages <= len(LANGUAGES):
        raise ValueError(f"--languages={languages}: must be from 1 to {len(LANGUAGES)}")
    codes = list(LANGUAGES)[:languages]
    arguments = corpus_settings(dataclasses.replace(setup, model_dir=_NOWHERE))
    # By position: so gin does not make the config's own source, whose files need not be there.
    settings = setup.corpus(
        arguments.pop("folder"),
        _Unread(codes),
        **arguments,
        instead=lambda corpus: corpus.settings(),
    )
    assert isinstance(settings, dict)
    directions = directions_of(setup.mixture, settings["languages"])
    source, target = settings["vocabulary_size"], settings["target_vocabulary_size"]
    sizes = {"vocab_size": source} if target is None else {}
    if target is not None:
        sizes = {"vocab_size": target, "source_vocab_size": source}
    return model_of(setup, sizes, len(directions)), directions


def train_program(setup: Setup, devices: Sequence[Any], languages: int) -> PlannedProgram:
    """The step of `m4 train`: the function that the loop compiles, with its shardings.

    Raises:
        ValueError: a mesh that is not possible, sizes that do not divide over it.
    """
    mesh: Mesh = setup.mesh(devices=devices)
    model, directions = planned_model(setup, languages)
    rows = setup.batch_size
    source_length, target_length = setup.lengths["inputs"], setup.lengths["targets"]

    def lower(step: loop.Program) -> PlannedProgram:
        tx = step.optimizer
        shardings = state_shardings(mesh, model, tx, step.zero)
        with shapes_only():
            abstract = jax.eval_shape(functools.partial(initialize, model, tx, setup.seed))
        state: TrainState = _placed(abstract, shardings)
        batch = _batch(mesh, rows, source_length, target_length)
        traced = loop.jit_step(step.step, shardings).trace(state, batch)
        return PlannedProgram(
            traced.lower(),
            traced.jaxpr,
            model,
            state.params,
            abstract_variables(model)["params_axes"],
            state.optimizer,
            rows,
            source_length,
            target_length,
            1,
            len(directions),
        )

    shapes = [(rows, source_length, target_length)]
    program = instead_of_training(setup, model, mesh, directions, lower, shapes)
    assert isinstance(program, PlannedProgram)
    return program


def decode_program(setup: Setup, devices: Sequence[Any], languages: int) -> PlannedProgram:
    """The beam search of `m4 decode` for a batch of the longest sources, over the config's mesh:
    the function that it compiles, with its shardings.

    Sentences are as many as `jobs.Decoding.batch_rows`, made up to a multiple of the devices that
    rows lie over.

    Raises:
        ValueError: as `train_program`.
    """
    model, directions = planned_model(setup, languages)
    settings = setup.decoding
    source_length, rows = settings.max_source_length, settings.batch_rows
    asked = (
        target_limit(source_length, settings.max_target_length),
        settings.beams,
        settings.alpha,
    )
    variables = abstract_variables(model)
    params = dict(variables["params"])
    layout = translation_layout(setup, model, directions, devices)
    if layout is None:
        here = SingleDeviceSharding(devices[0])
        params = _placed(params, jax.tree.map(lambda _: here, params))
        tokens_BL = jax.ShapeDtypeStruct((rows, source_length), jnp.int32, sharding=here)
        traced = search.trace(model, params, tokens_BL, *asked)
        lowered = traced.lower()
    else:
        rows = layout.rows(rows)
        params = _placed(params, layout.shardings(variables["params_axes"], params))
        with layout.axis_rules():
            tokens_BL = _rows(layout.mesh, (rows, source_length), jnp.int32)
            batch = {"encoder_input_tokens": tokens_BL}
            traced = jit_search(layout, model, *asked).trace(params, batch)
            lowered = traced.lower()
    return PlannedProgram(
        lowered,
        traced.jaxpr,
        model,
        params,
        variables["params_axes"],
        None,
        rows,
        source_length,
        asked[0],
        settings.beams,
        len(directions),
    )


def _batch(mesh: Mesh, rows: int, source_length: int, target_length: int) -> dict[str, Any]:
    """What the stream gives (`m4.data.stream.batches.lay_out`), as shapes on the mesh."""
    widths = {ENCODER_KEYS: source_length, DECODER_KEYS: target_length}
    return {
        key: _rows(mesh, (rows, width), jnp.float32 if key == "decoder_loss_weights" else jnp.int32)
        for keys, width in widths.items()
        for key in keys
    }


def _rows(mesh: Mesh, shape: tuple[int, int], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, logical_spec(("batch",)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )

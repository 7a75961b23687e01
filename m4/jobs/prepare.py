"""What jobs do first: check the sizes, make the stream, the model, the trainer."""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from m4.data.cache.cache import Cache
from m4.data.preprocess import language_of
from m4.data.samplers.learned import ALIGNMENT, Learned
from m4.data.stream import mixture
from m4.data.stream.buckets import batch_shapes
from m4.data.stream.stream import Stream
from m4.eval.scoring.levels import LEVELS
from m4.experiment import Baselines, Experiment, partial_arguments
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel import distributed
from m4.parallel.layout import Layout
from m4.settings import SettingError
from m4.train.multitask.groups import Directions
from m4.train.trainer import Trainer
from m4.train.training import BY_DIRECTION


def run_folder(experiment: Experiment) -> Path:
    """Returns MODEL_DIR."""
    return Path(experiment.model_dir)


def model_folder(experiment: Experiment, dense: bool = False) -> Path:
    """Where a model's checkpoints and decodes are."""
    folder = run_folder(experiment)
    return folder / "compare" / "dense" if dense else folder


def check_sizes(experiment: Experiment) -> Mesh:
    """The mesh; everything of a training whose size is known before the corpus is there has been
    checked: model, optimizer, the shapes of batches, the shards of every array.

    Raises:
        SettingError: a mesh that these devices cannot make; sizes that do not divide over it or do
            not fit together; an optimizer or sampler that cannot be made.
    """
    training, lengths = experiment.training, experiment.data.corpus.lengths
    mesh = training.mesh()
    _check_learned(experiment)
    if training.early_stopping is not None:
        allowed = "None: a multilingual training does not measure dev/chrf, bilingual ones do"
        raise SettingError("Training.early_stopping", training.early_stopping, allowed)
    training.optimizer(training.total_steps)
    stream = experiment.data.stream
    shapes = batch_shapes(
        training.batch_size,
        lengths["inputs"],
        lengths["targets"],
        **(partial_arguments(stream) if isinstance(stream, functools.partial) else {}),
    )
    _check_directions(experiment)
    # Of other directions than the corpus has.
    general = dataclasses.replace(
        experiment, training=dataclasses.replace(training, **dict.fromkeys(BY_DIRECTION))
    )
    program = trainer_of(general, expected_model(experiment), _DIRECTIONS, mesh, shapes).program
    _ = program.shardings
    return mesh


def _check_learned(experiment: Experiment) -> None:
    """SettingError: a sampler that learns has nothing to learn from."""
    training, sampler = experiment.training, experiment.data.sampler
    if not isinstance(sampler, Learned):
        return
    setting, period = "Training.dev_period", training.dev_period
    if sampler.reads == ALIGNMENT:
        if training.cosines is None:
            allowed = "measured for the signal alignment: @cosines.GradientCosines()"
            raise SettingError("Training.cosines", None, allowed)
        setting, period = "GradientCosines.period", training.cosines.period
    if period >= training.total_steps:
        raise SettingError(
            setting,
            period,
            f"less than total_steps = {training.total_steps}: a learned sampler learns from the "
            "evaluations within training",
        )


def _check_directions(experiment: Experiment) -> None:
    """SettingError: a setting by direction that names none of the corpus's."""
    training, corpus = experiment.training, experiment.data.corpus
    if any(getattr(training, name) is not None for name in BY_DIRECTION):
        names = corpus.directions(corpus.settings()["languages"])
        Trainer(training, expected_model(experiment), names, training.mesh()).check_directions()


def check_decoding_sizes(experiment: Experiment) -> None:
    """SettingError: a mesh that these devices cannot make, a model that cannot lie over it."""
    model = expected_model(experiment)
    variables = abstract_variables(model)
    if layout := decoding_layout(experiment, model, _DIRECTIONS):
        layout.shardings(variables["params_axes"], variables["params"])


def check_baselines(levels: Baselines) -> None:
    """SettingError: a bilingual model or its optimizer that cannot be made."""
    for one in map(levels.of, LEVELS):
        abstract_variables(expected_model(one))
        one.training.optimizer(one.training.total_steps)


_DIRECTIONS = ["en-xx", "xx-en"]


def expected_model(experiment: Experiment) -> Transformer:
    """The model before the corpus is there, which decides the number of directions, and may make a
    vocabulary a little smaller."""
    corpus = experiment.data.corpus
    sizes = {"vocab_size": corpus.target_vocabulary_size or corpus.vocabulary_size}
    if corpus.target_vocabulary_size is not None:
        sizes["source_vocab_size"] = corpus.vocabulary_size
    return experiment.build_model(sizes, len(_DIRECTIONS))


def training_stream(experiment: Experiment, cache: Cache) -> Stream:
    """Returns the batches of training, drawn at the sampler's first rates."""
    data, training = experiment.data, experiment.training
    return mixture.make_stream(
        cache,
        data.sampler,
        data.sample_by,
        training.total_steps,
        data.stream,
        seed=training.seed,
        batch_rows=training.batch_size,
        source_length=data.corpus.lengths["inputs"],
        target_length=data.corpus.lengths["targets"],
    )


def model_for(experiment: Experiment, cache: Cache) -> Transformer:
    """Returns the model for the corpus's vocabulary."""
    sizes = {"vocab_size": cache.target_vocabulary.size}
    if cache.separate:
        sizes["source_vocab_size"] = cache.source_vocabulary.size
    return experiment.build_model(sizes, len(cache.directions))


def trainer_of(
    experiment: Experiment,
    model: Transformer,
    directions: Sequence[str],
    mesh: Mesh | None = None,
    batch_shapes: Sequence[tuple[int, int, int]] = (),
    cache: Cache | None = None,
) -> Trainer:
    """The trainer of a model over the experiment's mesh.

    batch_shapes: (rows, source length, target length) of its batches. cache: the directions' sizes
    and levels; None: there is no corpus.

    Raises:
        SettingError: sizes that do not divide over the mesh.
    """
    training = experiment.training
    return Trainer(
        training,
        model,
        directions,
        training.mesh() if mesh is None else mesh,
        batch_shapes,
        None if cache is None else known_of(experiment, cache, directions),
    )


def decoding_layout(
    experiment: Experiment, model: Transformer, directions: Sequence[str]
) -> Layout | None:
    """The model's layout in translation, over the experiment's mesh; None: one device."""
    return trainer_of(experiment, model, directions).layout()


def known_of(experiment: Experiment, cache: Cache, directions: Sequence[str]) -> Directions:
    """Directions with their training pairs and levels."""
    sizes = {name: cache.size(language_of(name), "train") for name in directions}
    levels = levels_of(experiment, cache).items()
    inside = {level: [d for d in members if d in sizes] for level, members in levels}
    return Directions(directions, sizes, inside)


def layout_or_first_device(
    experiment: Experiment, model: Transformer, directions: Sequence[str], job: str
) -> Layout | None:
    """`decoding_layout`; where these devices cannot make the mesh, None, with a line on stderr."""
    try:
        return decoding_layout(experiment, model, directions)
    except ValueError as error:
        why = distributed.first_line(error)
        print(f"{job}: on the first device alone: {why}", file=sys.stderr)
        return None


def levels_of(experiment: Experiment, cache: Cache) -> dict[str, list[str]]:
    """Resource level -> directions."""
    levels: dict[str, list[str]] = {level: [] for level in LEVELS}
    for direction in cache.directions:
        pairs = cache.size(language_of(direction), "train")
        levels[experiment.data.levels.of(pairs)].append(direction)
    return levels


def note_of(cache: Cache, **more: Any) -> Mapping[str, Any]:
    """What a checkpoint remembers of the text that it was trained on."""
    return {"vocabulary": cache.vocabulary.fingerprint, **more}


def console() -> Console:
    """80 columns are rich's guess where there is no terminal: too few for the tables."""
    return Console(width=None if sys.stdout.isatty() else 120)


def print_files(terminal: Console, paths: Iterable[Path]) -> None:
    """A line for each file that a job has written."""
    for path in paths:
        terminal.print(str(path), highlight=False, soft_wrap=True)

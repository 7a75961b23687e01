"""Trainers for tests: settings that most of them share, and a run in one call."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from m4.data.cache.cache import Cache
from m4.data.samplers.learned import Learned
from m4.data.stream import mixture
from m4.data.stream.stream import Stream
from m4.model.transformer import Transformer
from m4.storage.metrics_log import read_metrics
from m4.train import loop
from m4.train.loop import BatchStream, Trained
from m4.train.optimizer import adamw
from m4.train.program import TrainProgram, train_program
from m4.train.sampling import LearnedSampling
from m4.train.training import Training


def training_of(
    optimizer: Callable[[int], optax.GradientTransformation] = adamw, **changes: Any
) -> Training:
    settings = {"total_steps": 10, "batch_size": 4, "tensorboard": False}
    return Training(optimizer=optimizer, **{**settings, **changes})


def program_of(
    model: Transformer, mesh: Mesh, optimizer: optax.GradientTransformation, directions: int = 2,
    **changes: Any,
) -> TrainProgram:  # fmt: skip
    """Returns the program of a step with this optimizer."""
    training = training_of(lambda steps: optimizer, **changes)
    return train_program(training, model, [f"en-x{i}" for i in range(directions)], mesh)


# What differs from run to run in rows of metrics: all that a clock measures.
# FLOPs, too, are those of the steps whose time counts: none was compiled in them.
_TIMES = ("seconds", "per_second", "mfu", "goodput")


def timeless_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl without times and speeds."""
    return [
        {name: value for name, value in row.items() if not any(part in name for part in _TIMES)}
        for row in read_metrics(folder)
    ]


def learned_sampling(
    cache: Cache, sampler: Learned, total_steps: int, make: Callable[..., Stream],
    settings: Mapping[str, int],
) -> tuple[Stream, LearnedSampling]:  # fmt: skip
    """Returns the stream that `make` gives of a cache at a sampler's rates, and what learns them.

    `settings` decide when it learns, by name.
    """
    stream = mixture.make_stream(cache, sampler, "tokens", total_steps, make)
    unit = mixture.units(cache, "tokens")
    start = sampler(mixture.sizes(cache, "tokens"))
    rates = functools.partial(mixture.pair_rates, unit=unit)
    return stream, LearnedSampling(sampler, start, rates, stream, settings)


# What `loop.train` takes; all else are settings.
_OF_RUN = ("evaluators", "sampling", "groups", "note", "flops", "progress")


def train(
    folder: Path, model: Transformer, stream: BatchStream, mesh: Mesh,
    optimizer: Callable[[int], optax.GradientTransformation] = adamw, **options: Any,
) -> Trained:  # fmt: skip
    """Trains; `options` are settings of `Training` and arguments of `loop.train`."""
    run = {name: options.pop(name) for name in _OF_RUN if name in options}
    training = training_of(optimizer, **{"batch_size": stream.shape[0], **options})
    program = train_program(training, model, stream.directions, mesh, stream.shape)
    return loop.train(program, training, folder, stream, **run)

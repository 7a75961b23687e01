"""A cache's tasks for T5X: the module for MIXTURE_OR_TASK_MODULE and for gin_configs/t5x.

    M4_CACHE=runs/demo/data python -m t5x.train --gin.MIXTURE_OR_TASK_MODULE="'m4.t5x_tasks'" ...

registers the tasks when this module is imported. The functions below register the cache they get,
so that a config which asks for its vocabulary needs no variable. Importing seqio takes seconds.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m4.data import tasks
from m4.data.cache.cache import Cache
from m4.data.directions import split_direction
from m4.eval.metrics import Metric


@functools.cache
def register(cache: str, prefix: str = "m4") -> Cache:
    """Registers the tasks and mixtures of a cache's folder, with BLEU and chrF."""
    opened = Cache(Path(cache).expanduser())
    tasks.register_cache(opened, prefix, metric_fns=metric_fns)
    return opened


def metric_fns(direction: str) -> list[Callable[..., dict[str, float]]]:
    """BLEU, in the tokenization of its target language, and chrF, for seqio's Evaluator."""
    from m4.eval.metrics.bleu import bleu
    from m4.eval.metrics.chrf import chrf

    _, language = split_direction(direction)
    return [_metric_fn(bleu, language), _metric_fn(chrf, language)]


def _metric_fn(metric: Metric, language: str) -> Callable[..., dict[str, float]]:
    def call(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
        counted = metric(predictions, targets, language, [""] * len(targets))
        return {counted.metric: counted.value()}

    call.__name__ = getattr(metric, "__name__", type(metric).__name__)  # seqio prints it
    return call


def inputs_vocabulary(cache: str) -> Any:
    """The seqio vocabulary of `inputs`, for a T5X model's input_vocabulary."""
    return _feature(cache, "inputs").vocabulary


def targets_vocabulary(cache: str) -> Any:
    """The seqio vocabulary of `targets`, for a T5X model's output_vocabulary."""
    return _feature(cache, "targets").vocabulary


def vocab_size(cache: str, multiple: int = 128) -> int:
    """Rows of the targets' embedding: pieces, rounded up like `Experiment.vocabulary_multiple`."""
    return -(-register(cache).target_vocabulary.size // multiple) * multiple


def source_vocab_size(cache: str, multiple: int = 128) -> int | None:
    """Rows of the sources' embedding, or None if they share that of the targets."""
    opened = register(cache)
    if not opened.separate:
        return None
    return -(-opened.source_vocabulary.size // multiple) * multiple


def _feature(cache: str, name: str) -> Any:
    opened = register(cache)
    task = tasks.seqio.TaskRegistry.get(tasks.task_name(opened.directions[0]))
    return task.output_features[name]


if folder := os.environ.get("M4_CACHE"):
    register(folder)

"""Massively multilingual, mixture-of-experts machine translation in JAX.

    import m4

    run = m4.train("gin_configs/demo.gin", model_dir="runs/demo")
    run = m4.load("runs/demo")
    run.translate(["3 weeks ago"], to="gl")

The names below are imported on first use (PEP 562), so `import m4` is quick. `m4.train` is also
the package of the training code: a function with the attributes of that package.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from m4.api import Corpus as Corpus
    from m4.api import Run as Run
    from m4.api import delta as delta
    from m4.api import load as load
    from m4.api import plot_delta as plot_delta
    from m4.api import prepare_corpus as prepare_corpus
    from m4.data.corpus import CorpusSpec as CorpusSpec
    from m4.experiment import Baselines as Baselines
    from m4.experiment import Data as Data
    from m4.experiment import Decoding as Decoding
    from m4.experiment import Experiment as Experiment
    from m4.experiment import Sampling as Sampling
    from m4.experiment import Training as Training
    from m4.model.moe import MoeLayer as MoeLayer
    from m4.model.transformer import Transformer as Transformer
    from m4.settings import SettingError as SettingError

_HOMES = {
    "m4.api": ("Corpus", "Run", "delta", "load", "plot_delta", "prepare_corpus"),
    "m4.data.corpus": ("CorpusSpec",),
    "m4.experiment": ("Baselines", "Data", "Decoding", "Experiment", "Sampling", "Training"),
    "m4.model.moe": ("MoeLayer",),
    "m4.model.transformer": ("Transformer",),
    "m4.settings": ("SettingError",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "train", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # imported here because it is slow

        return metadata.version("m4")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'm4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_Function = TypeVar("_Function", bound="Callable[..., Any]")


def _as_package(function: _Function) -> _Function:
    """Replaces the package of the same name by a function, which imports would hide otherwise."""
    package = importlib.import_module(f"m4.{function.__name__}")
    function.__name__ = package.__name__
    for name in ("__file__", "__loader__", "__package__", "__path__", "__spec__"):
        setattr(function, name, getattr(package, name))
    sys.modules[package.__name__] = function  # type: ignore[assignment]
    return function


@_as_package
def train(
    experiment: Experiment | str | Path, *, model_dir: str | Path | None = None,
    bindings: Collection[str] = (), init_from: str | Path | None = None, fresh: bool = False,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Run:  # fmt: skip
    """Trains an experiment, given as an object or a gin file, from its latest checkpoint.

    Args:
        experiment: An experiment, or the name of a gin file.
        model_dir: The run's folder. Defaults to the experiment's own.
        bindings: Bindings that override the gin file, such as "TRAIN_STEPS = 100".
        init_from: Another run, RUN or RUN@STEP, or a T5X checkpoint: the initial parameters of a
            new run. Defaults to random parameters.
        fresh: Whether to remove what is in the run's folder and start over.
        log: Function called with each new row of metrics.jsonl, {"step": ..., name: number or
            None}. Only the first of several processes calls it.

    Raises:
        InputError: A setting is wrong, or the folder belongs to another config.
    """
    from m4 import api
    from m4.jobs.open_run import open_run
    from m4.jobs.train import check_and_train
    from m4.settings import InputError, SettingError

    if not (log is None or callable(log)):
        raise InputError(f"log = {log!r}: must be a function of a row of metrics.jsonl")
    config = api.config_of(experiment, model_dir, bindings, init_from)
    found = config.experiment()
    with open_run(found, config, "train", fresh=fresh) as run:
        try:
            check_and_train(run.experiment, log=log)
        except SettingError as error:
            raise InputError(config.explain(error)) from error
    return api.Run(run.folder, found, config)

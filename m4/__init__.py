"""Massively multilingual, mixture-of-experts machine translation in JAX.

    import m4

    run = m4.train("gin_configs/demo.gin", model_dir="runs/demo")
    run = m4.load("runs/demo")
    run.translate(["3 weeks ago"], to="gl")

The names below are imported on first use (PEP 562): `import m4` is quick. `m4.train` is the room of
the training code, too: a package that can be called.
"""

import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m4.api import Corpus as Corpus
    from m4.api import Run as Run
    from m4.api import delta as delta
    from m4.api import load as load
    from m4.api import plot_delta as plot_delta
    from m4.api import prepare_corpus as prepare_corpus
    from m4.api import train as train
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
        from importlib import metadata  # slow: not for every program's first moments

        return metadata.version("m4")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'm4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallablePackage(types.ModuleType):
    """`m4.train` is a package; importing a module of it would hide a function of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("m4.api").train(*args, **kwargs)


importlib.import_module("m4.train").__class__ = _CallablePackage

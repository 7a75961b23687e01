"""The small model of most tests, and runs that tests of several files read.

Runs are made once a session, by the first worker that asks.
"""

import contextlib
import fcntl
import functools
import importlib
import json
import os
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.model.moe import MoeLayer, mean_metrics
from m4.model.transformer import Transformer
from m4.settings import is_checked
from tests.command_line import TINY, Said, m4
from tests.data.corpus import Made
from tests.documents.blocks import ROOT

SMALL_MOE = functools.partial(MoeLayer, num_experts=4, group_tokens=8)


def small_model(**changes: Any) -> Transformer:
    """Returns a model of a layer per stack, four experts and no dropout; `changes` are fields."""
    fields: dict[str, Any] = {
        "vocab_size": 32, "width": 8, "heads": 2, "head_width": 4, "mlp_width": 16,
        "encoder_layers": 1, "decoder_layers": 1, "moe": SMALL_MOE, "moe_every": 1,
        "dropout_rate": 0.0,
    }  # fmt: skip
    return Transformer(**{**fields, **changes})


def small_layer(**changes: Any) -> MoeLayer:
    """Returns a layer of four experts of five units, without dropout; `changes` are fields."""
    fields: dict[str, Any] = {"num_experts": 4, "mlp_width": 5, "activations": ("relu",)}
    return MoeLayer(**{**fields, "dropout_rate": 0.0, **changes})


def run_layer(
    layer: MoeLayer, params: Any, *tokens: Any, train: bool = False, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns y_BLM and metrics; `tokens` are x_BLM, mask_BL, ...; training has random numbers."""
    rngs = {"dropout": jax.random.key(1)} if train else None
    how = {"deterministic": not train, "rngs": rngs, "mutable": ["intermediates"], **more}
    y_BLM, sown = layer.apply({"params": params}, *tokens, **how)
    return y_BLM, mean_metrics(sown["intermediates"])


def model_for(corpus: Cache, **changes: Any) -> Transformer:
    """Returns `small_model` for a corpus's pieces."""
    return small_model(vocab_size=-(-corpus.target_vocabulary.size // 8) * 8, **changes)


def small_corpus(factory: pytest.TempPathFactory) -> Cache:
    """Builds made-up text of two languages, a few hundred pairs in four directions."""

    def make(folder: Path) -> None:
        made = Made({"gl": 60, "de": 120})
        lengths = {"inputs": 64, "targets": 64}
        CorpusSpec(made, vocabulary_size=300, lengths=lengths).build(folder / "data")

    return Cache(made_once(factory, "small_corpus", make) / "data")


def parts_in(package: ModuleType) -> dict[str, Callable[..., Any]]:
    """Returns a folder's gates, transports, ... by name: each file's function of that name."""
    modules = {
        module.name: importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    }
    found = {name: getattr(module, name, None) for name, module in modules.items()}
    return {name: part for name, part in found.items() if part and is_checked(part)}


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the read-only folder that `make` fills once; workers that need it meanwhile wait."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def tiny_run(factory: pytest.TempPathFactory) -> Path:
    """Returns the run of the tiny config, with checkpoints of steps 2 and 4, its last."""

    def make(folder: Path) -> None:
        m4("train", f"--gin_file={TINY}", f"--model_dir={folder}/run").ok()

    return made_once(factory, "tiny_run", make) / "run"


def every_step(factory: pytest.TempPathFactory) -> Path:
    """Returns a run of the tiny config on `tiny_run`'s corpus: three steps, all checkpoints."""

    def make(folder: Path) -> None:
        keep = [f"--gin.experiment.Training.{name}" for name in
                ("checkpoint_period=1", "keep_checkpoints=9", "dev_period=9")]  # fmt: skip
        data = f"--gin.experiment.Data.data_dir='{tiny_run(factory)}/data'"
        words = [f"--gin_file={TINY}", f"--model_dir={folder}/run", data, "--gin.TRAIN_STEPS=3"]
        m4("train", *words, *keep).ok()

    return made_once(factory, "every_step", make) / "run"


_BY_TARGET = (
    "from m4.model.gates import by_direction\nfrom m4.train.multitask import groups\n",
    "moe.MoeLayer.gate = @by_direction.by_direction\n"
    "experiment.Experiment.tasks = @groups.by_target\n",
)


def by_target(factory: pytest.TempPathFactory) -> Path:
    """Returns a run with a gate by target language; its config is by_target.gin next to it."""

    def make(folder: Path) -> None:
        first, (imports, bindings) = "from m4 import experiment\n", _BY_TARGET
        text = TINY.read_text(encoding="utf-8").replace(first, first + imports) + bindings
        config = folder / "by_target.gin"
        config.write_text(text, encoding="utf-8")
        data = f"--gin.experiment.Data.data_dir='{tiny_run(factory)}/data'"
        m4("train", f"--gin_file={config}", f"--model_dir={folder}/run", data).ok()

    return made_once(factory, "by_target", make) / "run"


DEMO = ("demo", "--gin_file=gin_configs/demo.gin", "--model_dir=runs/demo")


def demo_run(factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """Returns a working folder with runs/demo, which `DEMO` made there, and the command's output.

    Its gin_configs/ have tiny models.
    """

    def make(folder: Path) -> None:
        write_configs(folder)
        with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # for the baselines' processes
            patch.setenv("COLUMNS", "120")
            said = m4(*DEMO)
        assert said.status == 0, said.err
        (folder / "said.json").write_text(json.dumps([said.out, said.err]), encoding="utf-8")

    folder = made_once(factory, "demo_run", make)
    return folder, Said(0, *json.loads((folder / "said.json").read_text(encoding="utf-8")))


def write_configs(folder: Path) -> None:
    """Writes gin_configs/ as in the repository, except for the sizes."""
    for path in (ROOT / "gin_configs").rglob("*.gin"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(shortened(path.read_text(encoding="utf-8")), encoding="utf-8")


def shortened(config: str) -> str:
    """Returns a config with tiny.gin's sizes, but its own source of text and run folder."""
    own = ["MODEL_DIR =", "corpus.CorpusSpec.source ="]
    if "@cldr.Cldr" not in config:
        own.append("cldr.Cldr.")
    tiny = TINY.read_text(encoding="utf-8").splitlines()
    return "\n".join([config, *(line for line in tiny if not line.startswith(tuple(own)))]) + "\n"

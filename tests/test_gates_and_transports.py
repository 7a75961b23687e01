"""The demo's model on the demo's text, 50 steps with every gate and with every transport."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gin
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from m4 import jobs
from m4.__main__ import gin_arguments, parse_config, parser
from m4.core.axes import MESH_AXES
from m4.core.report import read_metrics
from m4.data.cache import Cache
from m4.data.stream import Stream
from m4.model import dispatch, gates
from tests.command_line import own_gin

CONFIGS = Path(__file__).parents[1] / "gin_configs"
STEPS = 50


def in_folder(package: ModuleType) -> dict[str, Callable[..., Any]]:
    """Name -> the function that a file of the folder is named after."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return {n: getattr(importlib.import_module(f"{package.__name__}.{n}"), n) for n in names}


GATES, TRANSPORTS = in_folder(gates), in_folder(dispatch)
SETTINGS = [*(("gate", name) for name in GATES), *(("transport", name) for name in TRANSPORTS)]


def config(name: str, *bindings: str) -> dict[str, str]:
    """All bindings of a config, as text; gin is configured by it."""
    others, more = gin_arguments(["train", f"--gin_file={CONFIGS / name}", *bindings])
    return parse_config(parser().parse_args(others), more)


@pytest.fixture(scope="module")
def setup() -> Iterator[jobs.Setup]:
    with own_gin():
        config("gates.gin")
        yield gin.get_configurable(jobs.Setup)()


@pytest.fixture(scope="module")
def corpus(setup: jobs.Setup, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return setup.corpus(
        folder=tmp_path_factory.mktemp("corpus") / "data",
        mixture_name=setup.mixture,
        source_length=setup.lengths["inputs"],
        target_length=setup.lengths["targets"],
    )


# data x node x expert x model of the transports that want several devices; tests have eight.
OVER_DEVICES = {"all_to_all": (2, 1, 4, 1), "hierarchical_all_to_all": (1, 2, 4, 1)}


def mesh(name: str) -> Mesh:
    shape = OVER_DEVICES.get(name)
    devices = np.array(jax.devices() if shape else jax.devices()[:1])
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(devices.reshape(shape or (1,) * len(MESH_AXES)), MESH_AXES, axis_types=kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "name"), SETTINGS, ids=[" ".join(s) for s in SETTINGS])
def test_fifty_steps(
    setup: jobs.Setup, corpus: Cache, tmp_path: Path, part: str, name: str
) -> None:
    chosen: dict[str, Any] = {part: (GATES if part == "gate" else TRANSPORTS)[name]}
    if name == "dense_to_sparse":  # both of its phases
        chosen["gate"] = functools.partial(chosen["gate"], anneal_steps=STEPS // 2)
    if name == "expert_choice":
        chosen["decoder_gate"] = GATES["top2_gshard"]
    chosen["group_tokens"] = 32  # eight groups, for eight devices
    model = jobs.build_model(setup, corpus, **chosen)
    # Four rows of the demo's 22 (eight for eight devices): two cores do not only run this.
    rows = 8 if name in OVER_DEVICES else 4
    stream = Stream(corpus, seed=0, batch_rows=rows, source_length=64, target_length=64)
    with warnings.catch_warnings():
        # `ragged` says that it is slow on CPUs.
        warnings.filterwarnings("ignore", ".*ragged_dot.*", UserWarning)
        setup.train(
            folder=tmp_path,
            model=model,
            stream=stream,
            mesh=mesh(name),
            total_steps=STEPS,
            log_period=10,
            tensorboard=False,
        )
    losses = [row["loss"] for row in read_metrics(tmp_path) if "loss" in row]
    assert len(losses) == STEPS // 10
    assert np.isfinite(losses).all()
    # From about log(3,072) = 8.03 and what smoothing, z-loss and balance add. Batches of four rows
    # differ, so that the last means may not be in order.
    assert losses[0] > losses[1] > losses[2] > max(losses[3:])
    assert losses[-1] < losses[0] - 0.9


def test_gates_gin_is_the_demo_with_a_line_for_every_gate() -> None:
    text = (CONFIGS / "gates.gin").read_text(encoding="utf-8")
    lines = re.findall(
        r"^(?:# )?transformer\.Transformer\.gate = (@(\w+)\.\w+)", text, re.MULTILINE
    )
    assert sorted(name for _, name in lines) == sorted(GATES)
    with own_gin():
        demo = config("demo.gin")
    for line, name in lines:
        with own_gin():
            bindings = config("gates.gin", f"--gin.transformer.Transformer.gate={line}")
            model = gin.get_configurable(jobs.Setup)().model(vocab_size=128)
        assert model.gate.__name__ == name
        for key, value in bindings.items():
            if key.startswith(("transformer.", "cldr.", "cache.")) and not key.endswith("gate"):
                assert demo[key] == value, key

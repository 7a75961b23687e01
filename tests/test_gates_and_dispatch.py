"""The demo's model on the demo's text, 50 steps with every gate and with every dispatch.

A run has one gate in the encoder, another in the decoder, and one dispatch.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from m4 import config
from m4.build import model_of
from m4.data.cache.cache import Cache
from m4.data.stream.stream import Stream
from m4.experiment import Experiment
from m4.model import dispatch, gates
from m4.model.moe import MoeLayer
from m4.parallel.axes import MESH_AXES
from m4.storage.metrics_log import read_metrics
from m4.train import loop
from m4.train.program import train_program
from tests.command_line import experiment_of
from tests.shared import parts_in
from tests.xla_flags import OPTIMIZED

CONFIGS = Path(__file__).parents[1] / "gin_configs"
STEPS = 50
GATE = "moe.MoeLayer.gate"


GATES, DISPATCH = parts_in(gates), parts_in(dispatch)


@dataclasses.dataclass(frozen=True)
class Run:
    """A training; `mesh` has the sizes of data x fsdp x node x expert x model."""

    encoder: str
    decoder: str
    dispatch: str
    mesh: tuple[int, ...] = (1, 1, 1, 1, 1, 1)


RUNS = [
    Run("top2_gshard", "switch", "einsum"),
    Run("topk", "noisy_topk", "gather"),
    Run("dense_to_sparse", "ktop1", "gather"),
    Run("expert_choice", "mixtral", "ragged"),  # expert_choice is not for decoders
    Run("deepseek", "topk", "dropless"),
    Run("base", "hash", "all_to_all", (1, 2, 1, 1, 2, 1)),
    Run("sam", "by_direction", "hierarchical_all_to_all", (1, 1, 1, 2, 2, 1)),
]
# No loss pulls their load apart.
WITHOUT_BALANCE_LOSS = {"base", "hash", "expert_choice"}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return experiment_of(CONFIGS / "gates.gin")


@pytest.fixture(scope="module")
def corpus(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return experiment.data.corpus.build(tmp_path_factory.mktemp("corpus") / "data")


def function_of(gate: str) -> Callable[..., Any]:
    if gate == "dense_to_sparse":  # both of its phases
        return functools.partial(GATES[gate], anneal_steps=STEPS // 2)
    return GATES[gate]


def mesh(shape: tuple[int, ...]) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)])
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(devices.reshape(shape), MESH_AXES, axis_types=kinds)


def test_the_runs_have_every_gate_and_dispatch() -> None:
    assert {gate for run in RUNS for gate in (run.encoder, run.decoder)} == {*GATES}
    assert {run.dispatch for run in RUNS} == {*DISPATCH}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "run", [pytest.param(run, id=f"{run.encoder} {run.decoder} {run.dispatch}") for run in RUNS]
)
def test_fifty_steps(
    experiment: Experiment, corpus: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:  # fmt: skip
    moe = functools.partial(
        MoeLayer,
        num_experts=8,
        group_tokens=32,  # eight groups
        dispatch=DISPATCH[run.dispatch],
    )
    model = model_of(
        experiment, {"vocab_size": corpus.target_vocabulary.size}, len(corpus.directions),
        moe=functools.partial(moe, gate=function_of(run.encoder)),
        decoder_moe=functools.partial(moe, gate=function_of(run.decoder)),
    )  # fmt: skip
    # Four rows of the demo's 22: two cores do not only run this.
    stream = Stream(corpus, seed=0, batch_rows=4, source_length=64, target_length=64)
    # Here the steps take longer than their compilation: unlike in other tests it pays to optimize.
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=OPTIMIZED))
    with warnings.catch_warnings():
        # `ragged` says that it is slow on CPUs.
        warnings.filterwarnings("ignore", ".*ragged_dot.*", UserWarning)
        training = dataclasses.replace(
            experiment.training, total_steps=STEPS, log_period=10, tensorboard=False
        )
        program = train_program(training, model, stream.directions, mesh(run.mesh))
        loop.train(program, training, tmp_path, stream)
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    losses = [row["loss"] for row in rows]
    assert len(losses) == STEPS // 10
    assert np.isfinite(losses).all()
    # From about log(3,072) = 8.03 and what smoothing, z-loss and balance add. Batches of four rows
    # differ, so that the last means may not be in order.
    assert losses[0] > losses[1] > losses[2] > max(losses[3:])
    assert losses[-1] < losses[0] - 0.9
    for row in rows:
        for layer, gate in (("encoder_1", run.encoder), ("decoder_1", run.decoder)):
            moe = f"moe/{layer}/"
            sown = {name[len(moe) :]: x for name, x in row.items() if name.startswith(moe)}
            assert np.isfinite([*sown.values()]).all(), (layer, sown)
            # Most tokens have an expert, and in the end no expert has most of them (on the way one
            # may, for a few steps: it was 0.508).
            assert sown["fraction_tokens_left_behind"] < 0.5, (layer, sown)
            load = [sown[f"load/{e}"] for e in range(8)]
            assert max(load) < 0.5 or row["step"] < STEPS, (layer, load)
            np.testing.assert_allclose(sum(load), 1.0, rtol=1e-4)
            dense = gate == "dense_to_sparse" and row["step"] <= STEPS // 2
            without = dense or gate in WITHOUT_BALANCE_LOSS
            assert (sown["auxiliary_loss"] == 0) == without, (layer, sown)


def test_gates_gin_is_the_demo_with_a_line_for_every_gate() -> None:
    text = (CONFIGS / "gates.gin").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:# )?moe\.MoeLayer\.gate = (@(\w+)\.\w+)", text, re.MULTILINE)
    assert sorted(name for _, name in lines) == sorted(GATES)

    def settings(name: str, *bindings: str) -> tuple[Experiment, dict[str, str]]:
        made = config.load([CONFIGS / name], bindings)
        return made.experiment(), made.settings

    _, demo = settings("demo.gin")
    for line, name in lines:
        experiment, found = settings("gates.gin", f"moe.MoeLayer.gate = {line}")
        gate: Any = experiment.model(vocab_size=128).encoder_experts
        assert gate.gate.__name__ == name
        for key, value in found.items():
            if key.startswith(("transformer.", "moe.", "cldr.", "corpus.")) and key != GATE:
                assert demo[key] == value, key

"""Every strategy of gin_configs/strategies on 8 devices is one device: loss and gradients.

What is sharded there: tests/test_strategies_parts.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from m4.data.stream.batches import DECODER_KEYS, ENCODER_KEYS
from m4.experiment import Experiment
from m4.model.transformer import Transformer
from m4.parallel.axes import MESH_AXES
from m4.parallel.mesh import make_mesh, to_global
from m4.plan.hlo import collectives
from m4.train.program import train_program
from tests.command_line import experiment_of

FOLDER = Path(__file__).parents[1] / "gin_configs" / "strategies"
# The others in CI.
FIRST = ("data_parallel", "zero", "tensor_parallel", "expert_parallel")


def names(first: tuple[str, ...] | None = None) -> list[Any]:
    """Returns configs' names as a test's parameters; with `first`, the others are thorough."""
    found = sorted(path.stem for path in FOLDER.glob("*.gin"))
    late = [] if first is None else {*found} - {*first}
    return [pytest.param(n, marks=[pytest.mark.thorough] if n in late else []) for n in found]


def experiment_named(name: str, *bindings: str) -> Experiment:
    """Returns the experiment of a config, with bindings on top."""
    return experiment_of(FOLDER / f"{name}.gin", *bindings)


def documented(name: str) -> dict[str, str]:
    """Returns the config's row in the table of docs/parallelism.md."""
    text = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (head,) = (row for row in rows if row[:2] == ["gin file", "paper"])
    (row,) = (row for row in rows if row[:1] == [f"`{name}`"])
    return dict(zip(head, row, strict=True))


VOCABULARY, DIRECTIONS, ROWS, LENGTH = 64, ["en-gl", "gl-en"], 24, 8

# The config's own model, small; what it says of devices, rows and layers stays.
SMALL = [
    "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}", "transformer.Transformer.width = 16",
    "transformer.Transformer.head_width = 2", "transformer.Transformer.mlp_width = 16",
]  # fmt: skip
SMALL_EXPERTS = ["moe.MoeLayer.group_tokens = 8"]


class Rows:
    """Stand-in for a stream, with real tokens, padding and two packed pairs in some rows."""

    directions = DIRECTIONS
    shape = (ROWS, LENGTH, LENGTH)

    def batch(self, step: int, part: tuple[int, int] = (0, 1)) -> Mapping[str, np.ndarray]:
        random = np.random.default_rng(step)
        shape = (ROWS, LENGTH)
        real = np.arange(LENGTH) < random.integers(2, LENGTH + 1, (ROWS, 1))
        second = (np.arange(LENGTH) >= 4).astype(np.int32)
        segment = np.where(real, 1 + second * (np.arange(ROWS)[:, None] % 2), 0).astype(np.int32)
        found: dict[str, np.ndarray] = {}
        for keys in (ENCODER_KEYS, DECODER_KEYS):
            for key in keys:
                if key.endswith("tokens"):
                    value = np.where(real, random.integers(2, VOCABULARY, shape), 0)
                elif key.endswith("weights"):
                    value = real.astype(np.float32)
                elif key.endswith("segment_ids"):
                    value = segment
                elif key.endswith("positions"):
                    value = np.where(segment == 2, np.arange(LENGTH) - 4, np.arange(LENGTH))
                else:
                    value = np.broadcast_to(np.arange(ROWS)[:, None] % 2, shape)
                found[key] = value.astype(np.float32 if key.endswith("weights") else np.int32)
        return found

    def fingerprint(self) -> str:
        return ""


class Taken(NamedTuple):
    """Result of a step; `sent` has the kinds of the collectives in its compiled program."""

    model: Transformer
    loss: float
    gradients: Any
    sent: set[str]


@functools.cache
def a_step(name: str, alone: bool, *bindings: str) -> Taken:
    """Takes a step of the config or, if `alone`, on one device and in one piece."""
    dense = experiment_named(name).model(vocab_size=VOCABULARY).moe is None
    small = SMALL if dense else [*SMALL, *SMALL_EXPERTS]
    experiment = experiment_named(name, *small, *bindings)
    model = experiment.model(vocab_size=VOCABULARY, directions=len(DIRECTIONS))
    if model.moe is not None:  # half as much to compile; a pipeline needs two layers
        model = model.clone(encoder_layers=1, decoder_layers=1, moe_every=1)
    training = dataclasses.replace(
        experiment.training,
        total_steps=1,
        batch_size=ROWS,
        # Keeps the gradients as they are; out of weights they would come rounded.
        optimizer=lambda steps: optax.trace(decay=0.0),
    )
    mesh = training.mesh()
    if alone:
        model = model.clone(remat="none", pipeline_microbatches=0)
        mesh = make_mesh(**dict.fromkeys(MESH_AXES, 1), devices=jax.devices()[:1])
        training = dataclasses.replace(
            training, fsdp_axes=(), extra_axis_rules=(), grad_accum_steps=1
        )
    program = train_program(training, model, DIRECTIONS, mesh, Rows.shape)
    with program.axis_rules():
        state = program.new_state()
        batch = to_global(mesh, Rows().batch(0))
        step = program.jit().lower(state, batch).compile()
        sent = {found.kind for found in collectives(step.as_text() or "")}
        state, metrics = jax.block_until_ready(step(state, batch))
    return Taken(model, float(metrics["loss"]), jax.device_get(state.optimizer.trace), sent)


def assert_alike(found: Taken, alone: Taken) -> None:
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-5)
    assert found.loss > math.log(VOCABULARY) / 2
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(alone.gradients),
        jax.tree.leaves(found.gradients),
        strict=True,
    ):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max(), err_msg=where)
        assert np.abs(a).max() > 0, where


@pytest.mark.parametrize("name", names(FIRST))
def test_eight_devices_are_one(name: str) -> None:
    found = a_step(name, False)
    alone = a_step(next((n for n, kind in ALONE if kind(found.model)), name), True)
    assert_alike(found, alone)
    # Kinds do not change with the sizes: they are those of the documentation's table.
    sent = documented(name)["collectives"].split(", ")
    assert found.sent == {KINDS[one.split()[1]] for one in sent}
    assert not alone.sent


KINDS = {
    "AR": "all-reduce", "AG": "all-gather", "AA": "all-to-all", "CP": "collective-permute",
}  # fmt: skip


def experts_of(model: Transformer) -> int:
    layer = model.encoder_experts
    return 0 if layer is None else layer.num_experts


# Models that are the same on one device are run there once.
ALONE: list[tuple[str, Callable[[Transformer], bool]]] = [
    ("data_parallel", lambda model: experts_of(model) == 8),
    ("two_dimensional", lambda model: experts_of(model) == 0),
]


@pytest.mark.thorough
def test_sharding_axes_that_the_table_leaves_whole_equals_one_device() -> None:
    """Buckets of relative positions and routers' experts over the rows' axis."""
    rules = (
        "experiment.Training.extra_axis_rules = [('relpos_buckets', 'data'), ('unmodeled', 'data')]"
    )
    assert_alike(a_step("data_parallel", False, rules), a_step("data_parallel", True))


@pytest.mark.thorough
def test_sharding_all_weights_but_experts_equals_one_device() -> None:
    """The form of gin_configs/moe_2048e_60l.gin: experts stay, all else is sharded."""
    found = a_step("expert_parallel", False, "experiment.Training.fsdp_axes = ('expert',)")
    assert_alike(found, a_step("data_parallel", True))
    # Without `zero` the config gathers nothing (the documentation's table).
    assert "all-gather" in found.sent


@pytest.mark.thorough
def test_layers_computed_again_but_for_products_are_one_device() -> None:
    products = "transformer.Transformer.remat = 'products'"
    found = a_step("rematerialisation", False, products)
    assert found.model.remat == "products"
    assert_alike(found, a_step("data_parallel", True))

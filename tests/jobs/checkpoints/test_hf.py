"""Pretrained models in Hugging Face's layout: read with equal logits, from T5 to Switch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m4.eval.decoding.search import search
from m4.jobs.checkpoints.source_hf import SourceHf
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.train import initial
from m4.train.initial import Rows
from tests.train.trainers import program_of

HF = Path(__file__).parents[2] / "testdata" / "hf"
NAMES = ("t5_1_0", "t5_1_1", "mt5", "madlad", "umt5", "switch")


@functools.cache
def source(name: str) -> SourceHf:
    return SourceHf(HF / name)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """What transformers computed, in m4's ids; decoders start with 0, whose row is the start's."""
    with np.load(HF / name / "golden.npz") as file:
        found = {key: file[key] for key in file}
    old_ids = source(name).vocabulary().old_ids
    for key in ("inputs", "targets", "greedy", "decoder_inputs"):
        found[key] = np.argsort(old_ids)[found[key]].astype(np.int32)
    for key in ("decoder_inputs", "greedy"):
        found[key][:, 0] = 0
    return {**found, "logits": found["logits"][:, :, old_ids]}


def begun(name: str, transformer: Transformer, **mesh: int) -> Any:
    """Parameters of a model that begins from a folder, over a mesh."""
    there = source(name)
    devices = jax.devices() if mesh else jax.devices()[:1]
    program = program_of(
        transformer, make_mesh(devices=devices, **mesh), optax.identity(), batch_size=8
    )
    like = program.abstract_state().params
    leaves = initial.plan(there.shapes, initial.shapes_of(like), None)
    there.check(transformer, initial.unused(leaves, there.shapes))
    fresh = program.new_params(initial.fresh_paths(leaves, like))
    rows = Rows(np.arange(there.vocabulary().size, dtype=np.int32), {})
    with program.axis_rules():
        return initial.take_over(leaves, there.read, fresh, lambda _: rows, {}, like)


def check_logits(name: str, model: Transformer, params: Any) -> None:
    wanted = golden(name)
    apply = jax.jit(functools.partial(model.apply, enable_dropout=False))
    inputs = (jnp.asarray(wanted[key]) for key in ("inputs", "decoder_inputs", "targets"))
    logits_BTV, real_BT = np.asarray(apply({"params": params}, *inputs)), wanted["targets"] > 0
    # A position whose target is padding computes no experts.
    np.testing.assert_allclose(logits_BTV[real_BT], wanted["logits"][real_BT], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model, wanted = source(name).model, golden(name)
    params = begun(name, model)
    check_logits(name, model, params)
    greedy_BT = wanted["greedy"][:, 1:]
    made_BKT, _ = search(model, params, wanted["inputs"], greedy_BT.shape[1], 1, 0.0)
    np.testing.assert_array_equal(made_BKT[:, 0], greedy_BT)


EXPERTS = functools.partial(MoeLayer, num_experts=4)  # GShard's gates, which sum to 1


@pytest.mark.parametrize("name", NAMES)
def test_logits_scanned_with_experts_and_on_eight_devices(name: str) -> None:
    """A Switch Transformer has experts of its own."""
    model = source(name).model
    if model.moe is None:
        check_logits(name, moe := model.clone(moe=EXPERTS), begun(name, moe))
    scanned = model.clone(scan_layers=True)
    check_logits(name, scanned, begun(name, scanned))
    params = begun(name, scanned, expert=2, model=2)
    assert len(params["token_embedder"]["embedding"].sharding.device_set) == 8
    check_logits(name, scanned, jax.device_get(params))

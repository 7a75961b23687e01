"""Rates by group of parameters: a factor of each update, and 0 leaves parameters bit-equal."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from m4.model.gates.deepseek import deepseek
from m4.parallel.layout import to_global
from m4.settings import SettingError
from m4.train.average import averaged, used
from m4.train.optimizer import adafactor, adamw, muon
from m4.train.parameter_rates import GROUPS, rate_of
from tests.shared import SMALL_MOE, small_model
from tests.train.test_step import MODEL, a_batch, mesh_of
from tests.train.trainers import program_of

SGD = optax.sgd(1.0)


def steps(model=MODEL, optimizer: Any = SGD, count=1, **settings):
    """The state before and after some steps on one device, by path, and the last metrics."""
    mesh = mesh_of(1, 1)
    program = program_of(model, mesh, optimizer, **settings)
    with program.axis_rules():
        state = program.new_state()
        before, metrics = jax.device_get(state.params), {}
        for _ in range(count):
            state, metrics = program.jit()(state, to_global(mesh, a_batch()))
    flat = [jax.tree_util.tree_flatten_with_path(jax.device_get(x))[0]
            for x in (before, state.params, used(state))]  # fmt: skip
    by_path = [{jax.tree_util.keystr(path): leaf for path, leaf in one} for one in flat]
    return *by_path, metrics, [path for path, _ in flat[0]]


@pytest.fixture(scope="module")
def plain():
    return steps()


def test_each_parameter_is_of_one_group(plain):
    """A group's own rate counts before its stack's; together the groups are the whole model."""
    paths = plain[-1]
    alone = {group: {jax.tree_util.keystr(p) for p in paths if not rate_of(p, {group: 0.0})}
             for group in GROUPS}  # fmt: skip
    assert alone["embeddings"] | alone["encoder"] | alone["decoder"] == {*plain[0]}
    assert sum(len(alone[name]) for name in ("embeddings", "encoder", "decoder")) == len(paths)
    # An untied matrix of the logits is one of the embeddings.
    logits = [jax.tree_util.DictKey(name) for name in ("logits_dense", "kernel")]
    assert rate_of(logits, {"embeddings": 0.0, "decoder": 0.5}) == 0.0
    assert alone["experts"] == {p for p in plain[0] if "experts" in p or "shared" in p}
    assert alone["router"] == {p for p in plain[0] if "router" in p}
    for path in paths:
        name = jax.tree_util.keystr(path)
        rate = rate_of(path, {"encoder": 0.0, "experts": 0.5})
        expected = 0.5 if name in alone["experts"] else float(name not in alone["encoder"])
        assert rate == expected, name


@pytest.mark.parametrize("learning_rates", [None, {"high": 2.0, "medium": 2.0, "low": 2.0}])
def test_updates_are_multiplied(plain, learning_rates):
    """By the rates of directions, too; averages see it: after one step they are the parameters."""
    rates = {"encoder": 0.25, "experts": 0.5, "embeddings": 0.0}
    optimizer = averaged(10, optimizer=lambda _: SGD)
    found = steps(optimizer=optimizer, parameter_rates=rates, learning_rates=learning_rates)
    before, after, average, _, paths = found
    for path in paths:
        name = jax.tree_util.keystr(path)
        factor = rate_of(path, rates) * (2.0 if learning_rates else 1.0)
        expected = factor * (plain[1][name] - plain[0][name])
        np.testing.assert_allclose(after[name] - before[name], expected, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(average[name], after[name], atol=1e-6)


@pytest.mark.parametrize("make", [adafactor, functools.partial(adamw, weight_decay=0.1), muon])
def test_frozen_parameters_stay_bit_equal(plain, make):
    """Weight decay, which needs no gradient, leaves them alone; all others move."""
    rates = {"encoder": 0.0, "router": 0.0}
    before, after, _, metrics, paths = steps(optimizer=make(10), count=2, parameter_rates=rates)
    frozen = {jax.tree_util.keystr(path): not rate_of(path, rates) for path in paths}
    for name in before:
        assert np.array_equal(before[name], after[name]) == frozen[name], name
    assert metrics["gradient_norm"] > 0


def test_frozen_parameters_have_no_gradient(plain):
    *_, metrics, _ = steps(parameter_rates={"decoder": 0.0, "encoder": 0.0})
    embeddings = [name for name in plain[0] if "embed" in name.split("]")[0]]
    moved = [plain[1][name] - plain[0][name] for name in embeddings]  # by SGD: the gradient
    norm = float(optax.tree.norm(moved))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_frozen_router_keeps_its_biases(rate):
    """They move by no gradient, but by the experts' loads."""
    moe = functools.partial(SMALL_MOE, gate=functools.partial(deepseek, bias_rate=0.1))
    before, after, *_ = steps(small_model(moe=moe), parameter_rates={"router": rate})
    biases = [name for name in before if name.endswith("['table']")]
    assert biases
    for name in biases:
        assert np.array_equal(before[name], after[name]) == (rate == 0.0), name


def test_rates_of_0_for_all_are_refused():
    said = "^Training.parameter_rates = .*: must be above 0 .* no parameter would be trained"
    with pytest.raises(SettingError, match=said):
        steps(parameter_rates={"embeddings": 0, "encoder": 0, "decoder": 0})

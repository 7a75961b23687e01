"""Laws for every dispatch implementation and every gate; what each of them moves and refuses."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from m4.model.dispatch.all_to_all import all_to_all
from m4.model.dispatch.gather import gather
from m4.model.dispatch.hierarchical_all_to_all import hierarchical_all_to_all
from m4.model.dispatch.ragged import ragged
from tests.model.dispatch.shared import (
    SETTINGS,
    M,
    Setting,
    assert_close,
    assert_right,
    numbers,
    on,
    planned,
    random_plan,
)
from tests.model.test_gates import GATES

FEW = Setting(None, 2, 4, 4, 3, 2)


def arguments(setting: Setting):
    x_GSM, _, experts = numbers(0, setting)
    return x_GSM, random_plan(0, *setting[1:]), experts


@pytest.mark.parametrize("name", SETTINGS)
def test_any_plan_on_every_mesh(name):
    _, *shape = SETTINGS[name]
    for seed in (0, 1):
        assert_right(SETTINGS[name], random_plan(seed, *shape), seed)


# An example costs compiled programs; a failing one is small enough as it is.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
FOR_GATES = ["one, more choices", "data 2 x node 2 x expert 2", "data 2 x expert 4"]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
@settings(max_examples=6, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 2**31),
    setting=st.sampled_from([SETTINGS[name] for name in FOR_GATES]),
    spare=st.integers(0, 2),
    real=st.sampled_from([0.2, 0.8, 1.0]),
    mode=st.sampled_from([(True, True), (False, False)]),
)
def test_every_gates_plans(gate, seed, setting, spare, real, mode):
    routing = planned(gate, setting, seed, setting.C - spare, real, mode)
    if routing is None:
        setting = SETTINGS["data 2 x expert 4"]
        routing = planned(gate, setting, seed, setting.C - spare, real, mode)
    assert routing is not None
    assert_right(setting, routing, seed)


@pytest.mark.parametrize(
    ("C", "K", "rows"),
    # S = 8, E = 4. K*S = 16 choices and E*C = 32 slots: results are gathered by choice.
    # K*S = 32 choices and E*C = 12 slots: no array has a row a choice, also not in gradients.
    [(8, 2, {8, 32, 16}), (3, 4, {8, 12})],
)
def test_rows_that_are_moved(C, K, rows):
    setting = Setting(None, 2, 8, 4, C, K)
    x_GSM, routing, experts = arguments(setting)

    def total(x_GSM, weight_GSK, experts):
        plan = dataclasses.replace(routing, weight_GSK=weight_GSK)
        return jnp.sum(gather(x_GSM, plan, experts))

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(x_GSM, routing.weight_GSK, experts)
    found = re.findall(rf"f32\[2,(\d+),{M}\]", str(program))
    assert {int(count) for count in found} == rows


# --- all_to_all, hierarchical_all_to_all ------------------------------------------

both = pytest.mark.parametrize("run", [all_to_all, hierarchical_all_to_all])


@both
@pytest.mark.parametrize("mesh", [None, {"data": 8}, {"data": 4, "model": 2}])
def test_without_sharded_experts_there_is_no_exchange(run, mesh):
    setting = Setting(mesh, 3, 4, 4, 2, 2)  # three groups: no matter
    with on(mesh):
        program = jax.make_jaxpr(run)(*arguments(setting))
        assert str(program) == str(jax.make_jaxpr(gather)(*arguments(setting)))


@both
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting({"data": 2, "expert": 4}, 12, 4, 4, 2, 2), "number of groups .* = 12: must"),
        (Setting({"data": 1, "node": 2, "expert": 4}, 8, 4, 12, 2, 2), "num_experts = 12: .* by 8"),
    ],
)
def test_what_does_not_divide_is_refused(run, setting, said):
    with on(setting.mesh), pytest.raises(ValueError, match=said):
        jax.eval_shape(run, *arguments(setting))


@both
def test_bfloat16_travels_as_bfloat16(run):
    setting = Setting({"data": 2, "node": 2, "expert": 2}, 8, 4, 4, 2, 2)
    x_GSM, routing, experts = arguments(setting)
    experts = jax.tree.map(lambda x: x.astype(jnp.bfloat16), experts)
    with on(setting.mesh):
        lines = jax.jit(run).lower(x_GSM.astype(jnp.bfloat16), routing, experts).as_text()
    exchanges = [line for line in lines.splitlines() if "stablehlo.all_to_all" in line]
    assert len(exchanges) == {all_to_all: 2, hierarchical_all_to_all: 4}[run]
    assert all("bf16>) ->" in line and "f32" not in line for line in exchanges)


# --- ragged -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [None, {"data": 2, "expert": 4}])
@pytest.mark.parametrize(("platform", "warned"), [("cpu", 1), ("gpu", 1), ("tpu", 0)])
def test_warns_once_elsewhere_than_on_a_tpu(monkeypatch, mesh, platform, warned):
    if mesh is None:
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with on(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            jax.make_jaxpr(lambda *given: ragged(*given))(*arguments(FEW))  # traced each time
    found = [w for w in caught if "dense expansion" in str(w.message)]
    assert len(found) == (1 if mesh else warned)


@pytest.mark.filterwarnings("ignore:ragged. on CPUs:UserWarning")
def test_rows_outside_every_expert_are_never_used(monkeypatch):
    # XLA leaves open what rows beyond the last group contain; an accelerator may leave anything.
    exact = lax.ragged_dot

    def wild(x_RM, size_E):
        inside_R = jnp.arange(x_RM.shape[0]) < jnp.sum(size_E)
        return jnp.where(inside_R[:, None], x_RM, jnp.nan)

    @jax.custom_vjp
    def ragged_dot(x_RM, w_EMF, size_E):
        return wild(exact(x_RM, w_EMF, size_E), size_E)

    def forward(x_RM, w_EMF, size_E):
        return ragged_dot(x_RM, w_EMF, size_E), (x_RM, w_EMF, size_E)

    def backward(saved, d_RF):
        x_RM, w_EMF, size_E = saved
        d_x_RM, d_w_EMF = jax.vjp(lambda x, w: exact(x, w, size_E), x_RM, w_EMF)[1](d_RF)
        return wild(d_x_RM, size_E), d_w_EMF, None

    ragged_dot.defvjp(forward, backward)
    x_GSM, routing, experts = arguments(FEW)
    routing = jax.tree.map(jnp.asarray, routing)  # it is indexed by traced arrays below
    assert (np.asarray(routing.position_GSK) < 0).any()  # so some rows are empty

    def total(x_GSM, experts):
        return jnp.sum(ragged(x_GSM, routing, experts))

    def value_and_gradients():
        return jax.jit(jax.value_and_grad(lambda *x: total(*x), argnums=(0, 1)))(x_GSM, experts)

    expected = value_and_gradients()
    monkeypatch.setattr(lax, "ragged_dot", ragged_dot)
    got = value_and_gradients()
    jax.tree.map(functools.partial(assert_close, name="ragged"), got, expected)

"""Ragged: the number of rows, the warning, and how little is computed."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from m4.model.dispatch.ragged import order_by_expert, ragged
from tests.model.dispatch.shared import Setting, assert_close, numbers, on, random_plan

SETTING = Setting(None, 2, 4, 4, 3, 2)


def arguments():
    x_GSM, _, experts = numbers(0, SETTING)
    return x_GSM, random_plan(0, *SETTING[1:]), experts


def test_rows_are_never_more_than_choices_or_slots():
    # 64 slots an expert for 2 * 4 * 2 = 16 choices; then 2 * 4 * 1 = 8 slots for as many choices.
    for C, rows in ((64, 16), (1, 8)):
        routing = random_plan(0, 2, 4, 4, C, 2)
        places, _ = jax.eval_shape(
            functools.partial(order_by_expert, num_experts=4, capacity=C),
            routing.expert_GSK,
            routing.position_GSK,
        )
        assert places.owner_GP.shape == (1, rows)


@pytest.mark.parametrize("mesh", [None, {"data": 2, "expert": 4}])
@pytest.mark.parametrize(("platform", "warned"), [("cpu", 1), ("gpu", 1), ("tpu", 0)])
def test_warns_once_elsewhere_than_on_a_tpu(monkeypatch, mesh, platform, warned):
    if mesh is None:
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with on(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            jax.make_jaxpr(lambda *given: ragged(*given))(*arguments())  # traced each time
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
    x_GSM, routing, experts = arguments()
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

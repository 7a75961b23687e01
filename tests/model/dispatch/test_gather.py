"""Gather moves as few rows as there are: those of choices, or those of slots."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from m4.model.dispatch.gather import Slots, combine, gather
from tests.model.dispatch.shared import M, Setting, numbers, random_plan


@pytest.mark.parametrize(
    ("C", "K", "rows"),
    # S = 8, E = 4. K*S = 16 choices and E*C = 32 slots: results are gathered by choice.
    # K*S = 32 choices and E*C = 12 slots: no array has a row a choice, also not in gradients.
    [(8, 2, {8, 32, 16}), (3, 4, {8, 12})],
)
def test_rows_that_are_moved(C, K, rows):
    setting = Setting(None, 2, 8, 4, C, K)
    x_GSM, _, experts = numbers(0, setting)
    routing = random_plan(0, *setting[1:])

    def total(x_GSM, weight_GSK, experts):
        plan = dataclasses.replace(routing, weight_GSK=weight_GSK)
        return jnp.sum(gather(x_GSM, plan, experts))

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(x_GSM, routing.weight_GSK, experts)
    found = re.findall(rf"f32\[2,(\d+),{M}\]", str(program))
    assert {int(count) for count in found} == rows


def test_results_are_added_up_at_their_token_by_hand():
    # S = 2 and K = 2: J = 4 choices for P = 2 slots. Token 0 has both, token 1 has none.
    places = Slots(jnp.array([[0, 1]]), jnp.array([[0, 1, 2, 2]]))
    done_GPM = jnp.array([[[1.0, 2.0], [10.0, 20.0]]])
    weight_GSK = jnp.array([[[0.5, 0.25], [0.0, 0.0]]])
    y_GSM = jax.jit(combine)(done_GPM, weight_GSK, places)
    # 0.5 * (1, 2) + 0.25 * (10, 20) = (3, 6); nothing for token 1.
    assert y_GSM.tolist() == [[[3.0, 6.0], [0.0, 0.0]]]
    gradients = jax.grad(lambda done, w: jnp.sum(combine(done, w, places)), argnums=(0, 1))
    d_done_GPM, d_weight_GSK = jax.jit(gradients)(done_GPM, weight_GSK)
    # A result counts its weight; a weight the sum of its result: 1 + 2 and 10 + 20.
    assert d_done_GPM.tolist() == [[[0.5, 0.5], [0.25, 0.25]]]
    assert d_weight_GSK.tolist() == [[[3.0, 30.0], [0.0, 0.0]]]

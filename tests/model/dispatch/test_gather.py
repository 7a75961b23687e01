"""Gather moves as few rows as there are: those of choices, or those of slots."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from m4.model.dispatch.gather import gather
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

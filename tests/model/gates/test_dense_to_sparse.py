"""Dense-to-sparse: both phases by hand, temperature, the layer with and without shortcut."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.gates.dense_to_sparse import dense_to_sparse
from m4.model.gates.switch import switch
from m4.model.moe import MoeLayer
from tests.model.gates.golden import PROBS, at_once, slots, tokens_of
from tests.shared import run_layer, small_layer

OPTIONS: dict[str, Any] = {"tau_max": 2.0, "tau_min": 0.5, "anneal_steps": 10}


def step(number: int):
    return jnp.asarray(number, jnp.int32)


def test_dense_phase_by_hand():
    # Half way down the temperature is .5 + (2 - .5) / 2 * (1 + cos(pi / 2)) = 1.25. Without a key
    # there is no noise: g = p^(1 / 1.25) over their sum. For t1, with p = .5, .1, .4:
    # .5^.8 = .57435, .1^.8 = .15849, .4^.8 = .48045, sum 1.21329: .47338, .13063, .39599.
    tokens = tokens_of(np.log(PROBS), train=True, step=step(5))
    gate = partial(at_once, dense_to_sparse, tokens, 3, slots(1), **OPTIONS)
    routing = gate(threshold=0.0)
    np.testing.assert_allclose(routing.metrics["temperature"], 1.25, rtol=1e-6)
    np.testing.assert_allclose(routing.weight_GSK[0, 1], [0.47338, 0.13063, 0.39599], atol=1e-5)
    assert routing.capacity == 4
    assert routing.expert_GSK[0].tolist() == [[0, 1, 2]] * 4
    assert routing.position_GSK[0].tolist() == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert routing.aux_loss == 0
    # Above .2 t1 has two experts, whose weights stay what they were.
    routing = gate(threshold=0.2)
    assert routing.position_GSK[0, 1].tolist() == [1, -1, 1]
    np.testing.assert_allclose(routing.weight_GSK[0, 1], [0.47338, 0, 0.39599], atol=1e-5)
    assert routing.shortcut is not None
    assert not routing.shortcut[0]


def test_the_noise_is_gumbels():
    # The largest of log p + Gumbel noise is a draw from p, whatever the temperature: of 4,000
    # tokens with p = .6, .3, .1 shares within five standard deviations of at most .0078.
    logits = np.broadcast_to(np.log(PROBS[0][0]), (1, 4000, 3))
    tokens = tokens_of(logits, train=True, step=step(3), rng=jax.random.key(0))
    plan = at_once(dense_to_sparse, tokens, 3, slots(1), threshold=0.0, **OPTIONS)
    weight_GSK = plan.weight_GSK
    np.testing.assert_allclose(weight_GSK.sum(axis=-1), 1.0, atol=1e-5)
    share = np.bincount(np.argmax(weight_GSK[0], axis=-1), minlength=3) / 4000
    np.testing.assert_allclose(share, PROBS[0][0], atol=0.039)


def test_after_the_annealing_it_is_switch():
    mask = [[True, True, False, True]]
    tokens = tokens_of(np.log(PROBS), mask, train=True, step=step(10))
    expected = at_once(switch, tokens, 3, slots(1), jitter=0.0)
    routing = at_once(dense_to_sparse, tokens, 3, slots(1), **OPTIONS)
    assert routing.shortcut is not None
    use, plan = routing.shortcut
    assert use
    jax.tree.map(np.testing.assert_array_equal, plan, expected)
    # By hand: t0 has expert 0's one slot, t1 finds it full, t2 is padding, t3 has expert 1's.
    assert routing.position_GSK[0].tolist() == [[0, -1, -1], [-1] * 3, [-1] * 3, [-1, 0, -1]]
    np.testing.assert_allclose(routing.weight_GSK[0, 0], [0.6, 0, 0], atol=1e-6)
    for name in ("aux_loss", "z_loss"):
        np.testing.assert_array_equal(getattr(routing, name), getattr(expected, name))
    for name in ("fraction_tokens_left_behind", "load_E", "dead_experts"):
        np.testing.assert_array_equal(routing.metrics[name], expected.metrics[name])


@pytest.mark.parametrize("where", [None, step(0), step(10)])
def test_outside_training_it_is_switch(where):
    tokens = tokens_of(np.log(PROBS), step=where, rng=jax.random.key(0))
    routing = at_once(dense_to_sparse, tokens, 3, slots(2), **OPTIONS)
    jax.tree.map(np.testing.assert_array_equal, routing, at_once(switch, tokens, 3, slots(2)))


@pytest.mark.parametrize(
    ("number", "tau"),
    [
        # Up from .5 in 4 steps, then down from 2 in 10: in the middle the mean, 1.25, and at three
        # tenths of the way .5 + .75 * (1 + cos(.3 pi)).
        (0, 0.5),
        (2, 1.25),
        (4, 2.0),
        (7, 0.5 + 0.75 * (1 + math.cos(0.3 * math.pi))),
        (9, 1.25),
        (14, 0.5),
        (99, 0.5),
    ],
)
def test_temperature(number, tau):
    tokens = tokens_of(np.log(PROBS), train=True, step=step(number))
    plan = at_once(dense_to_sparse, tokens, 3, slots(1), **OPTIONS, warmup_steps=4)
    np.testing.assert_allclose(plan.metrics["temperature"], tau, rtol=1e-6)


def test_the_layer_with_its_shortcut_is_the_layer_without():
    def gate(tokens, num_experts, capacity):
        return dense_to_sparse(tokens, num_experts, capacity, **OPTIONS)

    def long_way(tokens, num_experts, capacity):
        return replace(gate(tokens, num_experts, capacity), shortcut=None)

    x_BLM = np.random.default_rng(0).normal(size=(2, 16, 6)).astype(np.float32)
    mask_BL = np.arange(16)[None] < np.array([[16], [11]])

    def layer(gate) -> MoeLayer:
        # .25 * 16 / 4 = 1 slot, raised to Lingvo's 4: some tokens find no slot.
        return small_layer(group_tokens=16, train_capacity_factor=0.25, gate=gate)

    init = jax.jit(partial(layer(gate).init, deterministic=True))
    params: Any = jax.device_get(init(jax.random.key(1), x_BLM, mask_BL)["params"])
    params = {**params, "router": jax.tree.map(lambda w: 40.0 * w, params["router"])}

    @partial(jax.jit, static_argnames="gate")
    def run(gate, params, number):
        def loss(params):
            tokens = x_BLM, mask_BL
            y_BLM, metrics = run_layer(layer(gate), params, *tokens, train=True, step=number)
            return jnp.sum(jnp.sin(y_BLM)) + metrics["auxiliary_loss"], (y_BLM, metrics)

        return jax.value_and_grad(loss, has_aux=True)(params)

    outputs = []
    for number in (step(3), step(10)):
        both = [run(one, params, number) for one in (gate, long_way)]
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), *both)
        outputs.append(both[0][0][1])
    (_, dense), (_, sparse) = outputs
    assert dense["experts_per_token"] > 1.2
    assert dense["fraction_tokens_left_behind"] == 0
    assert dense["auxiliary_loss"] == 0
    # Top-1 with overflow: one expert less the share of those without a slot.
    assert 0 < sparse["fraction_tokens_left_behind"] < 1
    left = sparse["fraction_tokens_left_behind"]
    np.testing.assert_allclose(sparse["experts_per_token"], 1 - left, rtol=1e-6)
    assert sparse["auxiliary_loss"] > 0


def test_training_needs_the_step():
    tokens = tokens_of(np.log(PROBS), train=True)
    with pytest.raises(ValueError, match="dense_to_sparse needs the training step"):
        dense_to_sparse(tokens, 3, slots(1))

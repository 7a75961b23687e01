"""DeepSeek's gates against loops over tokens: choices, weights, loss, load, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.gates.deepseek import deepseek
from m4.model.moe import move_biases
from tests.model.gates.golden import (
    GOLDEN,
    at_once,
    balance_by_loops,
    random_case,
    slopes,
    slots,
    slots_by_loops,
    softmax,
    tokens_of,
)

G, S, E = 3, 10, 8
BIAS = np.array([0.3, -0.2, 0.0, 0.1, -0.4, 0.25, 0.0, 0.05])


def biased():
    return jnp.asarray(BIAS, jnp.float32)


def unbiased():
    return jnp.zeros(E)


def by_loops(logits, *, choices, scores, normalize, route_scale, expert_groups, best_groups, bias):
    """Returns (scores, experts, weights), computed token by token in float64."""
    members = E // expert_groups
    sigmoid = scores == "sigmoid"
    score = 1 / (1 + np.exp(-logits.astype(np.float64))) if sigmoid else softmax(logits)
    expert = np.zeros((*logits.shape[:2], choices), int)
    for g, s in np.ndindex(logits.shape[:2]):
        total = score[g, s] + bias
        rank = []
        for d in range(expert_groups):
            inside = sorted(total[d * members : (d + 1) * members], reverse=True)
            rank.append((-sum(inside[: 2 if sigmoid else 1]), d))
        allowed = [d for _, d in sorted(rank)[:best_groups]]
        order = sorted((-total[e], e) for e in range(E) if e // members in allowed)
        expert[g, s] = [e for _, e in order[:choices]]
    return score, expert, weights(score, expert, normalize, route_scale)


def weights(score, expert, normalize, route_scale):
    chosen = np.take_along_axis(score, expert, axis=-1)
    return route_scale * (chosen / chosen.sum(-1, keepdims=True) if normalize else chosen)


V3 = {"scores": "sigmoid", "normalize": True, "route_scale": 1.0}
CASES = {
    "plain": {"choices": 2, **V3, "expert_groups": 1, "best_groups": 1},
    "v3": {"choices": 3, **V3, "route_scale": 2.5, "expert_groups": 4, "best_groups": 2},
    "v2": {
        "choices": 3, "scores": "softmax", "normalize": False, "route_scale": 16.0,
        "expert_groups": 4, "best_groups": 3,
    },
    "groups of one": {"choices": 2, **V3, "expert_groups": 8, "best_groups": 4},
    "softmax with a bias": {
        "choices": 2, "scores": "softmax", "normalize": True, "route_scale": 1.0,
        "expert_groups": 2, "best_groups": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_loops(case):
    options = CASES[case]
    logits, mask = random_case(len(case), G, S, E)
    score, expert, weight = by_loops(logits, bias=BIAS, **options)
    C = 2
    slot = slots_by_loops(expert, mask, C)
    assert (slot[mask] < 0).any()  # some are dropped
    routing = at_once(deepseek, tokens_of(logits, mask, bias=biased), E, slots(C), **options)
    np.testing.assert_array_equal(routing.expert_GSK, expert)
    np.testing.assert_array_equal(routing.position_GSK, slot)
    np.testing.assert_allclose(routing.weight_GSK, weight * (slot >= 0), rtol=5e-6)
    share = score / score.sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.aux_loss, balance_by_loops(share, expert, mask), rtol=5e-6)
    # The load is that of all choices of real tokens, also of those without a slot.
    load = np.bincount(expert[mask].ravel(), minlength=E)
    np.testing.assert_array_equal(routing.bias_load_E, load)
    assert load.sum() == mask.sum() * options["choices"] > (slot >= 0).sum()
    # The choices are another set than without the bias or the groups.
    alone = {**options, "expert_groups": 1, "best_groups": 1}
    assert (by_loops(logits, bias=0 * BIAS, **alone)[1] != expert).any()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("v3", {"choices": 8, "route_scale": 2.5, "expert_groups": 8, "best_groups": 4}),
        ("plain", {"choices": 2}),
        ("unnormalised", {"choices": 3, "normalize": False, "expert_groups": 4, "best_groups": 2}),
    ],
)
def test_equals_hugging_face(case, options):
    with np.load(GOLDEN / "deepseek_v3.npz") as golden:
        logits, bias, expert, weight = (
            golden[f"{case}/{name}"] for name in ("logits", "bias", "expert", "weight")
        )
    tokens = tokens_of(logits[None], bias=lambda: jnp.asarray(bias))
    routing = at_once(deepseek, tokens, logits.shape[-1], slots(len(logits)), **options)
    found, given = np.asarray(routing.expert_GSK[0]), np.asarray(routing.weight_GSK[0])
    order = np.argsort(found, axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(found, order, -1), expert)
    np.testing.assert_allclose(np.take_along_axis(given, order, -1), weight, rtol=5e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_finite_differences_of_the_loops(case):
    """The choices, and with them the shares f, are fixed; s changes weights and P alone."""
    options = CASES[case]
    logits, mask = random_case(7, 2, 4, E)
    factor = np.random.default_rng(8).normal(size=(2, 4, options["choices"]))
    _, expert, _ = by_loops(logits, bias=BIAS, **options)

    def expected(x):
        score = 1 / (1 + np.exp(-x)) if options["scores"] == "sigmoid" else softmax(x)
        weight = weights(score, expert, options["normalize"], options["route_scale"])
        loss = balance_by_loops(score / score.sum(-1, keepdims=True), expert, mask)
        return np.sum(weight * factor * mask[..., None]) + loss

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(logits, bias_E):
        tokens = tokens_of(logits, mask, bias=lambda: bias_E)
        routing = deepseek(tokens, E, slots(8), **options)
        return jnp.sum(routing.weight_GSK * factor) + routing.aux_loss

    found, of_bias = gradients(jnp.asarray(logits), biased())
    np.testing.assert_allclose(
        found, slopes(expected, logits.astype(np.float64)), atol=2e-5 * options["route_scale"]
    )
    assert not np.asarray(of_bias).any()


def test_tiny_scores_keep_their_shares():
    # sigmoid(-100) and sigmoid(-101) are 0 in float32; their shares are 1 and e^-1 over 1 + e^-1.
    # A choice between scores of 0 is by the bias, or else by the lowest index.
    logits = np.full((1, 1, E), -200.0)
    logits[0, 0, :2] = -100.0, -101.0
    routing = at_once(deepseek, tokens_of(logits, bias=unbiased), E, slots(1))
    assert routing.expert_GSK.tolist() == [[[0, 1]]]
    first = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(routing.weight_GSK[0, 0], [first, 1 - first], rtol=1e-6)


def test_biases_move_by_the_sign_of_the_difference_to_the_mean_load():
    # Loads 5, 3, 3, 1: mean 3. Rates are sums over two parts: 2 * 0.01 is a rate of 0.01. In a
    # scanned stack each block has its own; here the second one has equal loads.
    params = {
        "encoder_1": {"moe": {"bias": {"table": jnp.array([0.0, 1.0, -1.0, 0.5])}}},
        "decoder_blocks": {"layer_1": {"moe": {"bias": {"table": jnp.zeros((2, 4))}}}},
        "decoder_bias": {"table": jnp.ones(4)},
    }
    load_E = jnp.array([5.0, 3.0, 3.0, 1.0])
    loads = {
        "encoder_1/moe/bias_load_E": load_E,
        "encoder_1/moe/bias_rate": jnp.array(0.02),
        "decoder_blocks/layer_1/moe/bias_load_E": jnp.stack([load_E, jnp.full(4, 7.0)]),
        "decoder_blocks/layer_1/moe/bias_rate": jnp.array([0.02, 0.02]),
    }
    moved = move_biases(params, loads, 2)
    change = np.array([-0.01, 0, 0, 0.01])
    found = moved["encoder_1"]["moe"]["bias"]["table"]
    np.testing.assert_allclose(found, np.array([0.0, 1.0, -1.0, 0.5]) + change, rtol=1e-6)
    found = moved["decoder_blocks"]["layer_1"]["moe"]["bias"]["table"]
    np.testing.assert_allclose(found, np.stack([change, 0 * change]), rtol=1e-6)
    np.testing.assert_array_equal(moved["decoder_bias"]["table"], 1.0)
    assert move_biases(params, {}, 2) is params


def test_the_bias_balances_the_load():
    """400 tokens that all like the first experts, 500 steps: the largest load comes near the mean.

    Scores differ by less than 1 and a step moves a bias by 0.002, so 500 steps are enough.
    """
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 0.5, (1, 400, E)) - np.linspace(0, 2, E), jnp.float32)

    @jax.jit
    def load(params):
        tokens = tokens_of(logits, bias=lambda: params["bias"]["table"])
        return deepseek(tokens, E, slots(400)).bias_load_E

    params = {"bias": {"table": jnp.zeros(E)}}
    largest = []
    for _ in range(500):
        load_E = load(params)
        largest.append(float(load_E.max() / load_E.mean()))
        params = move_biases(params, {"bias_load_E": load_E, "bias_rate": jnp.array(0.002)}, 1)
    assert largest[0] > 2
    assert largest[-1] < 1.1

"""Noisy top-k: a transcription of tensor2tensor's formulas, cases by hand, when there is noise."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from m4.model.gates.noisy_topk import noisy_topk, route
from tests.model.gates.golden import (
    at_once,
    best,
    random_case,
    slots,
    slots_by_loops,
    softmax,
    tokens_of,
)

planned = jax.jit(route, static_argnums=(4, 5), static_argnames=("choices", "importance", "load"))
erf = np.vectorize(math.erf, otypes=[float])


def cv2(x) -> float:
    x = np.asarray(x, np.float64)
    return x.var() / (x.mean() ** 2 + 1e-10)


def transcription(clean, noisy, sd, choices):
    """(gates, load), rows of tokens: noisy_top_k_gating and _prob_in_top_k, in float64."""
    clean, noisy, sd = (x.astype(np.float64) for x in (clean, noisy, sd))
    order = best(noisy, choices)
    gates = np.zeros_like(noisy)
    kept = np.take_along_axis(noisy, order, axis=-1)
    np.put_along_axis(gates, order, softmax(kept), axis=-1)
    if choices == noisy.shape[-1]:
        return gates, (gates > 0).sum(axis=0)
    falling = -np.sort(-noisy, axis=-1)
    threshold_if_in, threshold_if_out = falling[:, choices, None], falling[:, choices - 1, None]

    def cdf(x):
        return 0.5 * (1 + erf(x / (math.sqrt(2) * sd + 1e-20)))

    is_in = noisy > threshold_if_in
    chance = np.where(is_in, cdf(clean - threshold_if_in), cdf(clean - threshold_if_out))
    return gates, chance.sum(axis=0)


@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.1, 0.3), (1.0, 0.0)])
def test_equals_a_transcription(choices, factors):
    clean, mask = random_case(choices, G=3, S=10, E=4)
    rng = np.random.default_rng(choices)
    sd = rng.uniform(0.1, 2, clean.shape).astype(np.float32)
    noisy = clean + sd * rng.normal(size=clean.shape).astype(np.float32)
    routing = planned(
        clean, noisy, sd, mask, 4, 3, choices=choices, importance=factors[0], load=factors[1]
    )
    # The losses: over all real tokens of the batch, before capacity.
    gates, load = transcription(clean[mask], noisy[mask], sd[mask], choices)
    expected = factors[0] * cv2(gates.sum(axis=0)) + factors[1] * cv2(load)
    np.testing.assert_allclose(routing.aux_loss, expected, rtol=1e-5, atol=1e-8)
    # The plan.
    expert = best(noisy, choices)
    slot = slots_by_loops(expert, mask, 3)
    np.testing.assert_array_equal(routing.expert_GSK, expert)
    np.testing.assert_array_equal(routing.position_GSK, slot)
    weight = np.take_along_axis(gates, expert[mask], axis=-1) * (slot[mask] >= 0)
    np.testing.assert_allclose(np.asarray(routing.weight_GSK)[mask], weight, atol=2e-6)


def test_by_hand_an_untrained_gate_without_noise():
    # All logits 0: ties go to experts 0 and 1, half each. Importance (N/2, N/2, 0): mean N/3,
    # variance (1/36 + 1/36 + 1/9) N^2 / 3 = N^2/18, CV^2 = 9/18. Load (N, N, 0): the same.
    tokens = tokens_of(np.zeros((1, 4, 3)))
    routing = at_once(noisy_topk, tokens, 3, slots(3), importance=0.5, load=0.25)
    np.testing.assert_allclose(routing.aux_loss, 0.75 * 0.5, rtol=1e-6)
    assert routing.expert_GSK[0].tolist() == [[0, 1]] * 4
    np.testing.assert_allclose(routing.weight_GSK[0, :3], 0.5)
    # Three slots: the fourth token has none, and the losses do not change with it.
    assert routing.position_GSK[0].tolist() == [[0, 0], [1, 1], [2, 2], [-1, -1]]
    np.testing.assert_allclose(routing.z_loss, math.log(3) ** 2, rtol=1e-6)


@pytest.mark.parametrize("raw", [0.0, -30.0, 3.0])
def test_size_of_the_noise(raw):
    # Experts' logits d and 0 with noise of deviation sd each: the first wins with probability
    # Phi(d / (sd sqrt 2)), sd = ln(1 + e^raw) + .01. With d = sd that is Phi(.7071) = .76025; of
    # 4096 tokens 5 standard deviations are 5 sqrt(.76 * .24 / 4096) = .034.
    sd = math.log1p(math.exp(raw)) + 0.01
    clean = np.broadcast_to(np.array([sd, 0.0]), (1, 4096, 2))
    tokens = tokens_of(clean, noise_GSE=raw, train=True, rng=jax.random.key(0))
    routing = at_once(noisy_topk, tokens, 2, slots(4096), choices=1)
    assert abs(np.mean(routing.expert_GSK == 0) - 0.76025) < 0.034
    # The smooth load expects what happens: shares (.760, .240) +- .034 have a CV^2 of .271 +- .07,
    # as have the shares of weights.
    np.testing.assert_allclose(routing.aux_loss, 2 * (0.5205**2), atol=2 * 0.075)


def test_no_noise_outside_training_or_without_a_key():
    logits, mask = random_case(0, G=2, S=6, E=4)
    plans = [
        at_once(noisy_topk, tokens_of(logits, mask, train=train, rng=rng), 4, slots(6))
        for train, rng in ((False, None), (False, jax.random.key(0)), (True, None))
    ]
    expert = best(logits, 2)
    load = np.bincount(expert[mask].ravel(), minlength=4)
    importance = np.zeros(4)
    np.add.at(importance, expert[mask], softmax(np.take_along_axis(logits, expert, -1))[mask])
    for plan in plans:
        np.testing.assert_array_equal(plan.expert_GSK, expert)
        np.testing.assert_allclose(plan.aux_loss, cv2(importance) + cv2(load), rtol=1e-5)
    noisy = at_once(
        noisy_topk, tokens_of(logits, mask, train=True, rng=jax.random.key(0)), 4, slots(6)
    )
    assert (np.asarray(noisy.expert_GSK) != expert).any()


def test_both_matrices_start_as_zeros_and_are_made_without_training():
    asked = {}
    tokens = tokens_of(np.zeros((1, 4, 3)))

    def score(name, **how):
        asked[name] = how
        return tokens.score(name)

    noisy_topk(replace(tokens, score=score), 3, slots(3))
    assert asked == {"router": {"init": "zeros"}, "noise": {"init": "zeros"}}


def test_gradients_teach_both_matrices():
    logits, mask = random_case(1, G=2, S=8, E=4)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients_of_loss(clean, noise):
        tokens = tokens_of(logits, mask, train=True, rng=jax.random.key(0))
        by_name = {"router": clean, "noise": noise}
        tokens = replace(tokens, score=lambda name, **_: by_name[name])
        return noisy_topk(tokens, 4, slots(8)).aux_loss

    gradients = gradients_of_loss(logits, np.zeros_like(logits))
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert np.asarray(gradient)[mask].any()

"""The gates of the best experts: golden outputs, loops, jitter, tensor2tensor's formulas."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from m4.model.gates.ktop1 import ktop1
from m4.model.gates.mixtral import mixtral
from m4.model.gates.noisy_topk import noisy_topk
from m4.model.gates.sam import sam
from m4.model.gates.switch import switch
from m4.model.gates.topk import topk
from m4.model.routing import Tokens
from tests.model.gates import golden
from tests.model.gates.golden import all_at_once, at_once, best, slots, softmax, tokens_of
from tests.shared import small_layer


@pytest.mark.parametrize("case", golden.CASES)
@pytest.mark.parametrize(
    ("gate", "options"),
    [(switch, {}), (topk, {"choices": 1}), (ktop1, {"prototypes": 1})],
    ids=["switch", "topk", "ktop1"],
)
def test_one_expert_is_the_transcribed_switch(case, gate, options):
    alg1 = golden.read("alg1")
    tokens, E, C = golden.golden_tokens(golden.read("inputs"), case)
    routing = at_once(gate, tokens, E, slots(C), **options)
    combine = alg1[f"{case}/alg1/switch/combine"]
    golden.assert_same_plan(routing, combine, combine != 0, where="weight")
    # GShard's loss counts first choices too; times E^2 it is 1 when balanced. With padding: over
    # real tokens.
    variant = "all_nonpad" if case == "pad" else "none"
    expected = alg1[f"{case}/alg1/{variant}/l_aux_paper"] * E**2
    expected *= golden.groups_over_real_groups(case)
    np.testing.assert_allclose(routing.aux_loss, expected, rtol=2e-6)


@pytest.mark.parametrize("case", golden.CASES)
def test_normalised_top_2_is_gshards_without_the_coin(case):
    # As Tutel's: both choices always ask, and the gates are normalised before anything is dropped.
    # So are Mixtral's: the softmax of two logits is their probabilities over the sum of the two.
    alg1 = golden.read("alg1")
    tokens, E, C = golden.golden_tokens(golden.read("inputs"), case)
    normalized, raw = all_at_once(topk, tokens, E, slots(C), [{"normalize": True}, {}])
    combine, dispatch = (alg1[f"{case}/alg1/all/{part}"] for part in ("combine", "dispatch"))
    for routing in (normalized, at_once(mixtral, tokens, E, slots(C))):
        golden.assert_same_plan(routing, combine, dispatch)
    # Raw: the same slots, and the softmax itself as the weight.
    probs = softmax(np.asarray(tokens.score("router")))
    golden.assert_same_plan(raw, probs[..., None] * dispatch, dispatch)


VARIANTS: list[dict[str, Any]] = [
    {"normalize": normalize, "batch_priority": priority}
    for normalize in (False, True)
    for priority in (False, True)
]


@pytest.mark.parametrize("choices", [1, 2, 3, 5])
def test_equals_loops(choices):
    logits, mask = golden.random_case(choices, G=3, S=12, E=5)
    logits[0, 3] = logits[0, 9]  # an equal priority
    mask[0, [3, 9]] = True
    probs, expert = softmax(logits), best(logits, choices)
    chosen = np.take_along_axis(probs, expert, axis=-1)
    variants = [{"choices": choices, **variant} for variant in VARIANTS]
    tokens = tokens_of(logits, mask)
    plans = all_at_once(topk, tokens, 5, slots(3), variants)
    if choices == 1:
        jax.tree.map(np.testing.assert_array_equal, at_once(switch, tokens, 5, slots(3)), plans[0])
    balance = golden.balance_by_loops(probs, expert, mask)
    z = np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    for routing, variant in zip(plans, VARIANTS, strict=True):
        priority = probs.max(axis=-1) if variant["batch_priority"] else None
        slot = golden.slots_by_loops(expert, mask, 3, priority=priority)
        np.testing.assert_array_equal(routing.expert_GSK, expert, str(variant))
        np.testing.assert_array_equal(routing.position_GSK, slot, str(variant))
        weight = chosen / chosen.sum(axis=-1, keepdims=True) if variant["normalize"] else chosen
        np.testing.assert_allclose(
            routing.weight_GSK, weight * (slot >= 0), atol=2e-6, err_msg=str(variant)
        )
        np.testing.assert_allclose(routing.aux_loss, balance, rtol=2e-6)
        np.testing.assert_allclose(routing.z_loss, z[mask].mean(), rtol=2e-6)
        dropped = (slot < 0)[mask].mean(axis=0)
        names = ("first_overflow", "second_overflow")[:choices]
        np.testing.assert_allclose([routing.metrics[n] for n in names], dropped[:2], rtol=1e-6)


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_mixtrals_loss_equals_hugging_faces(choices):
    # load_balancing_loss_func with an attention mask, one layer: means over all tokens at once.
    # Groups differ in their number of tokens, so a mean over groups would be another number.
    logits, mask = golden.random_case(choices, G=4, S=10, E=5)
    mask[0, 2:] = False
    routing = at_once(mixtral, tokens_of(logits, mask), 5, slots(10), choices=choices)
    probs, expert = softmax(logits)[mask], best(logits, choices)
    one_hot = np.eye(5)[expert[mask]]  # [tokens, k, E]
    expected = 5 * np.sum(one_hot.mean(axis=0) * probs.mean(axis=0)[None])
    # Hugging Face counts each choice as 1: k when balanced.
    np.testing.assert_allclose(routing.aux_loss, expected / choices, rtol=2e-6)
    weight = softmax(np.take_along_axis(logits, expert, axis=-1)) * mask[..., None]
    np.testing.assert_allclose(routing.weight_GSK, weight, atol=2e-6)


@pytest.mark.parametrize("prototypes", [1, 2, 3])
def test_each_prototype_of_ktop1_is_a_switch_gate(prototypes):
    logits, mask = golden.random_case(prototypes, G=3, S=12, E=6)
    routing = at_once(ktop1, tokens_of(logits, mask), 6, slots(2), prototypes=prototypes)
    members, losses = 6 // prototypes, []
    for z in range(prototypes):
        part = slice(z * members, (z + 1) * members)
        alone = at_once(switch, tokens_of(logits[..., part], mask), members, slots(2))
        np.testing.assert_array_equal(
            routing.expert_GSK[..., z] - z * members, alone.expert_GSK[..., 0]
        )
        np.testing.assert_array_equal(routing.position_GSK[..., z], alone.position_GSK[..., 0])
        np.testing.assert_allclose(routing.weight_GSK[..., z], alone.weight_GSK[..., 0], atol=1e-6)
        losses.append(alone.aux_loss)
    assert (np.asarray(routing.position_GSK)[mask] < 0).any()  # some are dropped
    np.testing.assert_allclose(routing.aux_loss, np.mean(losses), rtol=1e-6)


def test_switchs_jitter_scales_what_the_router_sees_and_nothing_else():
    # Width 1: the logits are x u w with u ~ U(.75, 1.25), so that their ratio to x w is u.
    asked = []

    def gate(tokens: Tokens, num_experts, capacity):
        def score(*arguments, **how):
            asked.append(tokens.score(*arguments, **how))
            return asked[-1]

        return switch(replace(tokens, score=score), num_experts, capacity, jitter=0.25)

    layer = small_layer(mlp_width=3, gate=gate)
    x_BLM, mask_BL = np.full((8, 32, 1), 2.0, np.float32), np.ones((8, 32), bool)

    @jax.jit
    def evaluation_and_training():
        params = layer.init(jax.random.key(0), x_BLM, mask_BL, deterministic=True)["params"]
        asked.clear()
        outputs = [
            layer.apply({"params": params}, x_BLM, mask_BL, deterministic=not train, rngs=rngs)
            for train in (False, True)
            for rngs in ({"dropout": jax.random.key(1)},)
        ]
        return outputs, asked

    outputs, seen = jax.device_get(evaluation_and_training())
    plain, jittered = (np.ravel(y_BLM) for y_BLM in outputs)
    u_SE = np.asarray(seen[1]).reshape(256, 4) / np.asarray(seen[0]).reshape(256, 4)
    np.testing.assert_allclose(u_SE, np.broadcast_to(u_SE[:, :1], u_SE.shape), rtol=1e-5)
    u = u_SE[:, 0]
    assert u.dtype == np.float32
    # One draw a token and entry of x, the same for all experts: 256 draws of U(.75, 1.25), whose
    # standard deviation is .5 / sqrt(12) = .144; of their mean .009.
    assert len(np.unique(np.round(u, 5))) > 200
    assert (np.abs(u - 1) < 0.25 + 1e-5).all()
    assert abs(u.mean() - 1) < 0.045
    # The expert's input is not jittered: outputs p_e FFN_e(x) differ by the ratio of p_e only.
    first, second = (np.ravel(softmax(logits).max(axis=-1)) for logits in seen)
    kept = jittered != 0  # training drops some
    assert kept.any()
    np.testing.assert_allclose((jittered / plain)[kept], (second / first)[kept], rtol=1e-4)


@pytest.mark.parametrize(
    ("choices", "expert_groups"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 6), (3, 1)]
)
def test_sam_equals_loops(choices, expert_groups):
    logits, mask = golden.random_case(choices, G=3, S=12, E=6)
    probs, members = softmax(logits), 6 // expert_groups
    expert = np.zeros((3, 12, choices), int)
    misfit = np.zeros((3, 12))
    for g, s in np.ndindex(3, 12):
        p = probs[g, s]
        sums = [p[d * members : (d + 1) * members].sum() for d in range(expert_groups)]
        d = int(np.argmax(sums))
        inside = list(range(d * members, (d + 1) * members))
        expert[g, s] = d * members + best(p[inside], choices)
        last = p[expert[g, s, -1]]
        misfit[g, s] = sum(max(p[e] - last, 0) for e in range(6) if e not in inside)
    slot = golden.slots_by_loops(expert, mask, 2)
    assert (slot[mask] < 0).any()  # some are dropped
    options = {"choices": choices, "expert_groups": expert_groups}
    routing = at_once(sam, tokens_of(logits, mask), 6, slots(2), **options, alignment=0.5)
    np.testing.assert_array_equal(routing.expert_GSK, expert)
    np.testing.assert_array_equal(routing.position_GSK, slot)
    weight = np.take_along_axis(probs, expert, axis=-1) * (slot >= 0)
    np.testing.assert_allclose(routing.weight_GSK, weight, atol=2e-6)
    balance = golden.balance_by_loops(probs, expert, mask)
    # A single expert that is the best of all keeps its token from none, nor does one group.
    assert (misfit[mask].sum() > 0) == (1 < members < 6)
    np.testing.assert_allclose(routing.aux_loss, balance + 0.5 * misfit[mask].mean(), rtol=2e-6)


# --- noisy_topk -------------------------------------------------------------------

erf = np.vectorize(math.erf, otypes=[float])


def cv2(x) -> float:
    x = np.asarray(x, np.float64)
    return x.var() / (x.mean() ** 2 + 1e-10)


def transcription(clean, noisy, sd, choices):
    """Returns (gates, load) of noisy_top_k_gating and _prob_in_top_k, in float64."""
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
def test_noisy_topk_equals_a_transcription(choices, factors):
    clean, mask = golden.random_case(choices, G=3, S=10, E=4)
    raw = np.random.default_rng(choices).uniform(-2, 2, clean.shape).astype(np.float32)
    key = jax.random.key(choices)
    tokens = tokens_of(clean, mask, raw, train=True, rng=key)
    how = {"choices": choices, "importance": factors[0], "load": factors[1]}
    routing = at_once(noisy_topk, tokens, 4, slots(3), **how)
    sd = np.log1p(np.exp(raw)) + 0.01
    noisy = clean + sd * np.asarray(jax.random.normal(key, clean.shape))
    # The losses: over all real tokens of the batch, before capacity.
    gates, load = transcription(clean[mask], noisy[mask], sd[mask], choices)
    expected = factors[0] * cv2(gates.sum(axis=0)) + factors[1] * cv2(load)
    np.testing.assert_allclose(routing.aux_loss, expected, rtol=1e-5, atol=1e-8)
    # The plan.
    expert = best(noisy, choices)
    slot = golden.slots_by_loops(expert, mask, 3)
    np.testing.assert_array_equal(routing.expert_GSK, expert)
    np.testing.assert_array_equal(routing.position_GSK, slot)
    weight = np.take_along_axis(gates, expert[mask], axis=-1) * (slot[mask] >= 0)
    np.testing.assert_allclose(np.asarray(routing.weight_GSK)[mask], weight, atol=2e-6)


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
    logits, mask = golden.random_case(0, G=2, S=6, E=4)
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

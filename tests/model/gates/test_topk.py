"""Top-k: golden outputs, loops for every order of slots, cases by hand."""

from typing import Any

import numpy as np
import pytest

from m4.model.gates.mixtral import mixtral
from m4.model.gates.topk import topk
from tests.model.gates.golden import (
    CASES,
    PROBS,
    all_at_once,
    assert_same_plan,
    at_once,
    balance_by_loops,
    best,
    golden_tokens,
    random_case,
    read,
    slots,
    slots_by_loops,
    softmax,
    tokens_of,
    tokens_of_probs,
)


@pytest.mark.parametrize("case", CASES)
def test_normalised_top_2_is_gshards_without_the_coin(case):
    # As Tutel's: both choices always ask, and the gates are normalised before anything is dropped.
    # So are Mixtral's: the softmax of two logits is their probabilities over the sum of the two.
    alg1 = read("alg1")
    tokens, E, C = golden_tokens(read("inputs"), case)
    normalized, raw = all_at_once(topk, tokens, E, slots(C), [{"normalize": True}, {}])
    combine, dispatch = (alg1[f"{case}/alg1/all/{part}"] for part in ("combine", "dispatch"))
    for routing in (normalized, at_once(mixtral, tokens, E, slots(C))):
        assert_same_plan(routing, combine, dispatch)
    # Raw: the same slots, and the softmax itself as the weight.
    probs = softmax(np.asarray(tokens.score("router")))
    assert_same_plan(raw, probs[..., None] * dispatch, dispatch)


VARIANTS: list[dict[str, Any]] = [
    {"normalize": normalize, "slot_order": order, "batch_priority": priority}
    for normalize in (False, True)
    for order in ("choice", "token")
    for priority in (False, True)
]


@pytest.mark.parametrize("choices", [1, 2, 3, 5])
def test_equals_loops(choices):
    logits, mask = random_case(choices, G=3, S=12, E=5)
    logits[0, 3] = logits[0, 9]  # an equal priority
    mask[0, [3, 9]] = True
    probs, expert = softmax(logits), best(logits, choices)
    chosen = np.take_along_axis(probs, expert, axis=-1)
    variants = [{"choices": choices, **variant} for variant in VARIANTS]
    plans = all_at_once(topk, tokens_of(logits, mask), 5, slots(3), variants)
    for routing, variant in zip(plans, VARIANTS, strict=True):
        slot = slots_by_loops(
            expert,
            mask,
            3,
            token_major=variant["slot_order"] == "token",
            priority=probs.max(axis=-1) if variant["batch_priority"] else None,
        )
        np.testing.assert_array_equal(routing.expert_GSK, expert, str(variant))
        np.testing.assert_array_equal(routing.position_GSK, slot, str(variant))
        weight = chosen / chosen.sum(axis=-1, keepdims=True) if variant["normalize"] else chosen
        np.testing.assert_allclose(
            routing.weight_GSK, weight * (slot >= 0), atol=2e-6, err_msg=str(variant)
        )
        np.testing.assert_allclose(
            routing.aux_loss, balance_by_loops(probs, expert, mask), rtol=2e-6
        )


# PROBS: the best two experts of the four tokens
#   t0  .6 .3 .1   0, 1        t1  .5 .1 .4   0, 2
#   t2  .7 .2 .1   0, 1        t3  .2 .5 .3   1, 2


def by_hand(number, **options):
    return at_once(topk, tokens_of_probs(PROBS), 3, slots(number), **options)


def test_by_hand_one_slot_each():
    # First choices: expert 0 takes t0 (not t1, t2), expert 1 takes t3. Second choices: expert 1 is
    # full for t0 and t2, expert 2 takes t1, and t3 finds it full.
    routing = by_hand(1)
    assert routing.expert_GSK[0].tolist() == [[0, 1], [0, 2], [0, 1], [1, 2]]
    assert routing.position_GSK[0].tolist() == [[0, -1], [-1, 0], [-1, -1], [0, -1]]
    np.testing.assert_allclose(
        routing.weight_GSK[0], [[0.6, 0], [0, 0.4], [0, 0], [0.5, 0]], atol=1e-6
    )
    np.testing.assert_allclose(routing.metrics["fraction_tokens_left_behind"], 1 / 4)
    # Eight choices fall as 3, 3, 2: f = (3/8, 3/8, 2/8); P = (2.0, 1.1, .9) / 4:
    # 3 * (.375 * .5 + .375 * .275 + .25 * .225) = 1.040625; the paper's scale is a ninth.
    np.testing.assert_allclose(routing.aux_loss, 1.040625, rtol=1e-6)
    scaled = by_hand(1, paper_scale=True)
    np.testing.assert_allclose(scaled.aux_loss, 1.040625 / 9, rtol=1e-6)

"""Mixtral's gate: GShard's golden outputs, Hugging Face's loss by its formula, a case by hand."""

import numpy as np
import pytest

from m4.model.gates.mixtral import mixtral
from tests.model.gates.golden import (
    CASES,
    PROBS,
    assert_same_plan,
    at_once,
    best,
    golden_tokens,
    random_case,
    read,
    slots,
    softmax,
    tokens_of,
    tokens_of_probs,
)


@pytest.mark.parametrize("case", CASES)
def test_two_experts_are_gshards_without_the_coin(case):
    # The softmax of two logits is their probabilities over the sum of the two.
    alg1 = read("alg1")
    tokens, E, C = golden_tokens(read("inputs"), case)
    combine, dispatch = (alg1[f"{case}/alg1/all/{part}"] for part in ("combine", "dispatch"))
    assert_same_plan(at_once(mixtral, tokens, E, slots(C)), combine, dispatch)


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_loss_equals_hugging_faces(choices):
    # load_balancing_loss_func with an attention mask, one layer: means over all tokens at once.
    # Groups differ in their number of tokens, so a mean over groups would be another number.
    logits, mask = random_case(choices, G=4, S=10, E=5)
    mask[0, 2:] = False
    routing = at_once(mixtral, tokens_of(logits, mask), 5, slots(10), choices=choices)
    probs = softmax(logits)[mask]
    one_hot = np.eye(5)[best(logits, choices)[mask]]  # [tokens, k, E]
    expected = 5 * np.sum(one_hot.mean(axis=0) * probs.mean(axis=0)[None])
    # Hugging Face counts each choice as 1: k when balanced.
    np.testing.assert_allclose(routing.aux_loss, expected / choices, rtol=2e-6)
    # Weights: the softmax over the chosen logits, for real tokens.
    expert = best(logits, choices)
    np.testing.assert_array_equal(routing.expert_GSK, expert)
    weight = softmax(np.take_along_axis(logits, expert, axis=-1)) * mask[..., None]
    np.testing.assert_allclose(routing.weight_GSK, weight, atol=2e-6)


def test_by_hand():
    # p of the best two, and their shares: t0 .6 .3 -> 2/3 1/3; t1 .5 .4 -> 5/9 4/9; t2 .7 .2 ->
    # 7/9 2/9; t3 .5 .3 -> 5/8 3/8; experts 0 1, 0 2, 0 1, 1 2.
    routing = at_once(mixtral, tokens_of_probs(PROBS), 3, slots(4))
    assert routing.expert_GSK[0].tolist() == [[0, 1], [0, 2], [0, 1], [1, 2]]
    # All first choices before all second ones: expert 1 has t3, then t0 and t2.
    assert routing.position_GSK[0].tolist() == [[0, 1], [1, 0], [2, 2], [0, 1]]
    np.testing.assert_allclose(
        routing.weight_GSK[0],
        [[2 / 3, 1 / 3], [5 / 9, 4 / 9], [7 / 9, 2 / 9], [5 / 8, 3 / 8]],
        atol=1e-6,
    )
    # Choices fall as 3, 3, 2 of 8; P = (2.0, 1.1, .9) / 4:
    # 3 * (.375 * .5 + .375 * .275 + .25 * .225) = 1.040625.
    np.testing.assert_allclose(routing.aux_loss, 1.040625, rtol=1e-6)

"""Mixtral's gate: Hugging Face's loss by its formula; its plan is in test_topk.py."""

import numpy as np
import pytest

from m4.model.gates.mixtral import mixtral
from tests.model.gates.golden import at_once, best, random_case, slots, softmax, tokens_of


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

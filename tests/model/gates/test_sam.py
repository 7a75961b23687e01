"""SAM: loops, cases by hand for the group, the alignment loss and ties."""

import numpy as np
import pytest

from m4.model.gates.sam import sam
from m4.model.gates.topk import topk
from tests.model.gates.golden import (
    all_at_once,
    at_once,
    balance_by_loops,
    best,
    random_case,
    slots,
    slots_by_loops,
    softmax,
    tokens_of,
    tokens_of_probs,
)


@pytest.mark.parametrize(("choices", "expert_groups"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 6)])
def test_equals_loops(choices, expert_groups):
    logits, mask = random_case(choices, G=3, S=12, E=6)
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
    slot = slots_by_loops(expert, mask, 2)
    assert (slot[mask] < 0).any()  # some are dropped
    options = {"choices": choices, "expert_groups": expert_groups}
    variants = [{**options, "alignment": 0.5, "paper_scale": scale} for scale in (False, True)]
    routing, summed = all_at_once(sam, tokens_of(logits, mask), 6, slots(2), variants)
    np.testing.assert_array_equal(routing.expert_GSK, expert)
    np.testing.assert_array_equal(routing.position_GSK, slot)
    weight = np.take_along_axis(probs, expert, axis=-1) * (slot >= 0)
    np.testing.assert_allclose(routing.weight_GSK, weight, atol=2e-6)
    balance = balance_by_loops(probs, expert, mask)
    # A single expert that is the best of all keeps its token from none.
    assert (misfit[mask].sum() > 0) == (members > 1)
    np.testing.assert_allclose(routing.aux_loss, balance + 0.5 * misfit[mask].mean(), rtol=2e-6)
    expected = choices * balance + 0.5 * misfit[mask].sum()
    np.testing.assert_allclose(summed.aux_loss, expected, rtol=2e-6)


# Four experts in two groups. The sums of p by group, and the best experts in the better one:
#   t0  .40 .05 | .30 .25   .45, .55: the second group, though expert 0 is the best; experts 2, 3
#   t1  .10 .50 | .30 .10   .60, .40: the first group; experts 1, 0
PROBS = [[[0.4, 0.05, 0.3, 0.25], [0.1, 0.5, 0.3, 0.1]]]


def test_by_hand_one_expert():
    routing = at_once(sam, tokens_of_probs(PROBS), 4, slots(1), choices=1)
    assert routing.expert_GSK[0].tolist() == [[2], [1]]
    np.testing.assert_allclose(routing.weight_GSK[0], [[0.3], [0.5]], atol=1e-6)
    # Balance: f = (0, .5, .5, 0), P = (.25, .275, .3, .175): 4 * (.1375 + .15) = 1.15.
    # Misfit: t0 (.4 - .3) = .1 for expert 0, t1 none (.3 < .5): mean .05.
    np.testing.assert_allclose(routing.aux_loss, 1.15 + 0.05, rtol=1e-6)


def test_one_group_is_top_k():
    logits, mask = random_case(5, G=3, S=12, E=4)
    tokens = tokens_of(logits, mask)
    routing = at_once(sam, tokens, 4, slots(2), choices=3, expert_groups=1)
    plain = at_once(topk, tokens, 4, slots(2), choices=3)
    np.testing.assert_array_equal(routing.position_GSK, plain.position_GSK)
    np.testing.assert_allclose(routing.weight_GSK, plain.weight_GSK, atol=1e-7)
    np.testing.assert_allclose(routing.aux_loss, plain.aux_loss, rtol=1e-6)

"""k top-1: Z Switch gates side by side, and a case by hand."""

import numpy as np
import pytest

from m4.model.gates.ktop1 import ktop1
from m4.model.gates.switch import switch
from tests.model.gates.golden import (
    CASES,
    all_at_once,
    assert_same_plan,
    at_once,
    golden_tokens,
    random_case,
    read,
    slots,
    tokens_of,
    tokens_of_probs,
)


@pytest.mark.parametrize("prototypes", [1, 2, 3])
def test_each_prototype_is_a_switch_gate(prototypes):
    logits, mask = random_case(prototypes, G=3, S=12, E=6)
    variants = [{"prototypes": prototypes, "paper_scale": scale} for scale in (False, True)]
    routing, summed = all_at_once(ktop1, tokens_of(logits, mask), 6, slots(2), variants)
    members = 6 // prototypes
    losses = []
    for z in range(prototypes):
        part = slice(z * members, (z + 1) * members)
        alone = at_once(switch, tokens_of(logits[..., part], mask), members, slots(2))
        got = (x[..., z] for x in (routing.expert_GSK, routing.position_GSK, routing.weight_GSK))
        expert, slot, weight = got
        np.testing.assert_array_equal(expert - z * members, alone.expert_GSK[..., 0])
        np.testing.assert_array_equal(slot, alone.position_GSK[..., 0])
        np.testing.assert_allclose(weight, alone.weight_GSK[..., 0], atol=1e-6)
        losses.append(alone.aux_loss)
    assert (np.asarray(routing.position_GSK)[mask] < 0).any()  # some are dropped
    np.testing.assert_allclose(routing.aux_loss, np.mean(losses), rtol=1e-6)
    np.testing.assert_allclose(summed.aux_loss, np.sum(losses), rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_one_prototype_equals_the_switch_paper(case):
    combine = read("alg1")[f"{case}/alg1/switch/combine"]
    tokens, E, C = golden_tokens(read("inputs"), case)
    assert_same_plan(
        at_once(ktop1, tokens, E, slots(C), prototypes=1), combine, combine != 0, "weight"
    )


def test_by_hand():
    # Two prototypes of two experts, one slot each; their softmaxes (logits of the two are of
    # different size, which does not matter), and best experts:
    #   t0  .7 .3 | .4 .6   0, 3
    #   t1  .8 .2 | .5 .5   0, 2 (a tie)
    #   t2  .1 .9 | .9 .1   1, 2
    probs = np.array([[[0.7, 0.3, 0.4, 0.6], [0.8, 0.2, 0.5, 0.5], [0.1, 0.9, 0.9, 0.1]]])
    routing = at_once(ktop1, tokens_of_probs(probs * [1, 1, 7, 7]), 4, slots(1))
    assert routing.expert_GSK[0].tolist() == [[0, 3], [0, 2], [1, 2]]
    # t0 has the slot of expert 0, t1 that of expert 2.
    assert routing.position_GSK[0].tolist() == [[0, 0], [-1, 0], [0, -1]]
    np.testing.assert_allclose(routing.weight_GSK[0], [[0.7, 0.6], [0, 0.5], [0.9, 0]], atol=1e-6)
    # First: f = (2/3, 1/3), P = (1.6, 1.4) / 3: 2 * (3.2 + 1.4) / 9 = 9.2 / 9.
    # Second: f = (2/3, 1/3), P = (1.8, 1.2) / 3: 2 * (3.6 + 1.2) / 9 = 9.6 / 9. Mean: 9.4 / 9.
    np.testing.assert_allclose(routing.aux_loss, 9.4 / 9, rtol=1e-6)
    summed = at_once(ktop1, tokens_of_probs(probs), 4, slots(1), paper_scale=True)
    np.testing.assert_allclose(summed.aux_loss, 18.8 / 9, rtol=1e-6)

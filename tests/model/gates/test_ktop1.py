"""k top-1: Z Switch gates side by side."""

import numpy as np
import pytest

from m4.model.gates.ktop1 import ktop1
from m4.model.gates.switch import switch
from tests.model.gates.golden import all_at_once, at_once, random_case, slots, tokens_of


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

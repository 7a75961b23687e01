"""Expert choice: Lingvo's masks, sentences that do not notice their padding."""

import numpy as np
import pytest

from m4.model.gates.expert_choice import expert_choice
from tests.model.gates.golden import CASES, at_once, masks, read, slots, tokens_of


@pytest.mark.parametrize("case", CASES)
def test_equals_lingvo(case):
    inputs, lingvo = read("inputs"), read("lingvo")
    logits, mask = inputs[f"{case}/logits"], inputs[f"{case}/paddings"] == 0
    _, S, E = logits.shape
    factor = float(inputs[f"{case}/capacity"]) * E / S
    tokens = tokens_of(logits, mask, train=True)
    routing = at_once(expert_choice, tokens, E, slots(1), capacity_factor=factor)
    combine_GSEC, _ = masks(routing)
    expected = lingvo[f"{case}/expert_choice_v2/combine"]
    np.testing.assert_array_equal(combine_GSEC != 0, expected != 0)
    np.testing.assert_allclose(combine_GSEC, expected, atol=2e-6, rtol=0)
    used = np.count_nonzero(expected) / mask.sum()
    np.testing.assert_allclose(routing.metrics["experts_per_token"], used, rtol=1e-6)
    assert not {"first_overflow", "second_overflow", "second_dropped"} & routing.metrics.keys()


@pytest.mark.parametrize(("factor", "C"), [(2.0, 3), (1.0, 2), (8 / 3, 4), (0.01, 1), (9.0, 6)])
def test_slots(factor, C):
    # Six tokens, four experts: 6 * factor / 4 rounded up, at most one slot a token. (6 * 8/3 / 4 is
    # 4, and no more where 8/3 was rounded up.)
    tokens = tokens_of(np.zeros((1, 6, 4)), train=True)
    routing = at_once(expert_choice, tokens, 4, slots(1), capacity_factor=factor)
    assert routing.capacity == C
    assert (np.asarray(routing.position_GSK >= 0).sum(axis=1) == C).all()


@pytest.mark.parametrize("factor", [2.0, 0.3])
def test_outside_training_padding_changes_nothing(factor):
    rng = np.random.default_rng(0)
    for real in (1, 5):
        logits = rng.normal(size=(1, real, 4))

        def plan(length, logits=logits, real=real):
            padded = np.concatenate([logits, rng.normal(size=(1, length - real, 4))], axis=1)
            tokens = tokens_of(padded, np.arange(length)[None] < real)
            return at_once(expert_choice, tokens, 4, slots(1), capacity_factor=factor)

        alone = plan(real)
        assert (alone.position_GSK >= 0).any()
        for length in (real + 1, 16):
            padded = plan(length)
            np.testing.assert_array_equal(padded.position_GSK[:, :real], alone.position_GSK)
            np.testing.assert_allclose(
                padded.weight_GSK[:, :real], alone.weight_GSK, atol=1e-7, rtol=0
            )
            assert (padded.position_GSK[:, real:] == -1).all()


def test_in_training_padding_leaves_more_slots_to_the_others():
    # C = 2 * 4 / 2 = 4 of 4 tokens, of which one is real: it has both experts, and no pad has any.
    tokens = tokens_of(np.zeros((1, 4, 2)), [[False, True, False, False]], train=True)
    routing = at_once(expert_choice, tokens, 2, slots(1))
    assert routing.position_GSK[0].tolist() == [[-1, -1], [0, 0], [-1, -1], [-1, -1]]

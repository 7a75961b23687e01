"""Laws for every dispatch implementation and every gate: the numbers of the dense reference."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.model.dispatch.shared import SETTINGS, assert_right, planned, random_plan
from tests.model.test_gates import GATES


@pytest.mark.parametrize("name", SETTINGS)
def test_any_plan_on_every_mesh(name):
    _, *shape = SETTINGS[name]
    for seed in (0, 1):
        assert_right(SETTINGS[name], random_plan(seed, *shape), seed)


# An example costs compiled programs; a failing one is small enough as it is.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
FOR_GATES = ["one, more choices", "data 2 x node 2 x expert 2", "data 2 x expert 4"]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
@settings(deadline=None, max_examples=6, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 2**31),
    setting=st.sampled_from([SETTINGS[name] for name in FOR_GATES]),
    spare=st.integers(0, 2),
    real=st.sampled_from([0.2, 0.8, 1.0]),
    mode=st.sampled_from([(True, True), (False, False)]),
)
def test_every_gates_plans(gate, seed, setting, spare, real, mode):
    routing = planned(gate, setting, seed, setting.C - spare, real, mode)
    if routing is None:
        setting = SETTINGS["data 2 x expert 4"]
        routing = planned(gate, setting, seed, setting.C - spare, real, mode)
    assert routing is not None
    assert_right(setting, routing, seed)

"""Laws of every sampler in the folder, and a case of each worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import pkgutil
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data import samplers
from m4.data.samplers import Phase, Planned, Sampler
from m4.data.samplers.direction_weights import DirectionWeights
from m4.data.samplers.learned import Learned, improvement, loss
from m4.data.samplers.mixing_rates import mixing_rates
from m4.data.samplers.proportional import proportional
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.samplers.unimax import unimax

BY_FILE: dict[str, list[Sampler]] = {
    "temperature": [
        temperature,
        functools.partial(temperature, temperature=1.0),
        functools.partial(temperature, temperature=1e6),
        functools.partial(temperature, temperature=2.0, scale=3.0, maximum=900),
    ],
    "proportional": [proportional],
    "uniform": [uniform],
    "unimax": [
        functools.partial(unimax, budget=1, max_epochs=1.0),
        # All sizes are at most 1e6 and there are at most 30 of them.
        functools.partial(unimax, budget=3e7, max_epochs=3e7),
    ],
    "schedule": [Schedule([(0, temperature, None), (10, uniform, None)])],
    "learned": [Learned(), Learned(start=uniform)],
    "mixing_rates": [
        functools.partial(mixing_rates, rates={f"en-l{i}": 2.0 for i in range(30)}),
    ],
    "direction_weights": [DirectionWeights(), DirectionWeights(uniform, from_english=0.9)],
}
ALL = [
    pytest.param(one, id=f"{file}-{number}")
    for file, members in BY_FILE.items()
    for number, one in enumerate(members)
]
SIZES = st.dictionaries(
    st.sampled_from([f"en-l{i}" for i in range(30)]), st.integers(1, 10**6), min_size=1
)


def test_every_file_of_the_folder_is_here() -> None:
    assert {module.name for module in pkgutil.iter_modules(samplers.__path__)} == set(BY_FILE)


@pytest.mark.parametrize("sampler", ALL)
@given(sizes=SIZES)
def test_rates_are_positive_sum_to_1_keep_the_order_and_follow_the_size(
    sampler: Sampler, sizes: dict[str, int]
) -> None:
    rates = sampler(sizes)
    assert list(rates) == list(sizes)
    assert min(rates.values()) > 0
    assert sum(rates.values()) == pytest.approx(1.0)
    # Who has more is drawn at least as often, and repeats at most as often (but for rounding).
    for a, b in itertools.pairwise(sorted(sizes, key=sizes.__getitem__)):
        assert rates[a] <= rates[b] * (1 + 1e-9)
        assert rates[a] / sizes[a] >= rates[b] / sizes[b] * (1 - 1e-9)


@pytest.mark.parametrize("sampler", ALL)
def test_what_cannot_be_sampled(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="no examples to sample from in en-b"):
        sampler({"en-a": 1, "en-b": 0})
    with pytest.raises(ValueError, match=r"no directions to sample from \(CorpusSpec.languages"):
        sampler({})


# --------------------------------------------------------------------------- temperature


def test_temperature_by_hand() -> None:
    # 32^(1/5) = 2 and 1^(1/5) = 1.
    assert temperature({"a": 32, "b": 1}, 5.0) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert temperature({"a": 3, "b": 1}, 1.0) == pytest.approx({"a": 0.75, "b": 0.25})
    # Scale, then cap, then root. a: min(64 * 2, 100) = 100 -> 10; b: min(8 * 2, 100) = 16 -> 4.
    rates = temperature({"a": 64, "b": 8}, 2.0, scale=2.0, maximum=100)
    assert rates == pytest.approx({"a": 10 / 14, "b": 4 / 14})


@given(sizes=SIZES)
def test_temperature_1_is_proportional_and_a_high_one_uniform(sizes: dict[str, int]) -> None:
    assert temperature(sizes, 1.0) == pytest.approx(proportional(sizes))
    assert temperature(sizes, 1e6) == pytest.approx(uniform(sizes), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.5}, "temperature.temperature = 0.5: must be a number from 1"),
        ({"temperature": math.nan}, "temperature.temperature = nan: must be"),
        ({"scale": 0}, "temperature.scale = 0: must be a number above 0"),
        ({"maximum": -1}, "temperature.maximum = -1: must be a number or None above 0"),
    ],
)
def test_temperature_errors(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError) as error:
        temperature({"a": 1}, **options)
    assert said in str(error.value)


def test_proportional_and_uniform_by_hand() -> None:
    assert proportional({"z": 6, "a": 2}) == {"z": 0.75, "a": 0.25}
    assert uniform({"z": 1000, "a": 1}) == {"z": 0.5, "a": 0.5}


# --------------------------------------------------------------------------- unimax


def test_unimax_by_hand() -> None:
    # A budget of 1000 for 10, 100 and 5000 pairs, at most 4 times each. The smallest first:
    # 1000/3 > 40, so 40; (1000 - 40)/2 = 480 > 400, so 400; what is left, 560, is below 20000.
    sizes = {"big": 5000, "small": 10, "middle": 100}
    rates = unimax(sizes, max_epochs=4, budget=1000)
    assert rates == pytest.approx({"big": 0.56, "small": 0.04, "middle": 0.4})
    assert unimax(sizes, max_epochs=4, drawn=1000) == rates
    assert unimax(sizes, max_epochs=4, budget=1000, drawn=5) == rates  # the user's own counts
    # With room enough it is uniform: 1000/3 < 50 * 10.
    assert unimax(sizes, max_epochs=50, budget=1000) == pytest.approx(dict.fromkeys(sizes, 1 / 3))


@given(sizes=SIZES, max_epochs=st.floats(0.5, 100), part=st.floats(0.01, 1.0))
def test_unimax_is_the_most_uniform_that_keeps_the_bound(
    sizes: dict[str, int], max_epochs: float, part: float
) -> None:
    budget = part * max_epochs * sum(sizes.values())
    draws = {k: rate * budget for k, rate in unimax(sizes, max_epochs, budget).items()}
    most = max(draws.values())
    for name, count in draws.items():
        assert count <= max_epochs * sizes[name] * (1 + 1e-9)
        # Water-filling: who has less than the most has all that it may have.
        assert count == pytest.approx(min(most, max_epochs * sizes[name]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"budget": 12.0, "max_epochs": 1.0},
            "max_epochs = 1.0: must be at least 3, or train",
        ),
        ({}, "unimax.budget = None: must be set here"),
        ({"budget": 0.0}, "unimax.budget = 0.0: must be"),
        ({"max_epochs": 0.0}, "unimax.max_epochs = 0.0: must be a number above 0"),
        ({"max_epochs": math.inf}, "max_epochs = inf"),
    ],
)
def test_unimax_errors(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError) as error:
        unimax({"a": 3, "b": 1}, **options)
    assert said in str(error.value)


# --------------------------------------------------------------------------- sides


def test_direction_weights_by_hand() -> None:
    sizes = {"en-gl": 1, "gl-en": 1, "en-es": 3, "es-en": 3}
    # Proportional: 1/8, 1/8, 3/8, 3/8; a side's proportions are 1 to 3.
    rates = DirectionWeights(proportional, from_english=0.8)(sizes)
    assert rates == pytest.approx({"en-gl": 0.2, "gl-en": 0.05, "en-es": 0.6, "es-en": 0.15})
    assert list(rates) == list(sizes)
    assert DirectionWeights(proportional)(sizes) == pytest.approx(proportional(sizes))


@given(sizes=SIZES, share=st.floats(0.01, 0.99))
def test_direction_weights_have_their_shares_and_keep_proportions(
    sizes: dict[str, int], share: float
) -> None:
    both = sizes | {f"{name.removeprefix('en-')}-en": size for name, size in sizes.items()}
    rates, inner = DirectionWeights(from_english=share)(both), temperature(both)
    assert sum(rates[name] for name in sizes) == pytest.approx(share)
    for side, part in ((sizes, share), (both.keys() - sizes, 1 - share)):
        for name in side:
            assert rates[name] / part == pytest.approx(inner[name] * 2)  # each side has half there


@pytest.mark.parametrize("direction", ["en-xx", "xx-en"])
def test_directions_of_one_kind_keep_their_rates(direction: str) -> None:
    sizes = {direction.replace("xx", name): size for name, size in (("gl", 1), ("es", 3))}
    assert DirectionWeights(proportional, from_english=0.8)(sizes) == pytest.approx(
        proportional(sizes)
    )


def test_direction_weights_errors() -> None:
    for share in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=f"from_english = {share}: must be a number"):
            DirectionWeights(from_english=share)
    for sampler in (Schedule([(0, temperature, None)]), Learned()):
        with pytest.raises(ValueError, match=r"\.sampler = .*: must be neither a sched"):
            DirectionWeights(sampler)


# --------------------------------------------------------------------------- schedule


def test_schedule_by_hand() -> None:
    sizes = {"en-gl": 1, "en-es": 3, "gl-en": 1, "es-en": 3}
    schedule = Schedule([(0, proportional, ["es"]), (7, uniform, None), (9, uniform, ["en-gl"])])
    assert isinstance(schedule, Planned)
    assert samplers.plan(schedule, sizes) == [
        Phase(0, {"en-es": 0.5, "es-en": 0.5}),
        Phase(7, dict.fromkeys(sizes, 0.25)),
        Phase(9, {"en-gl": 1.0}),
    ]
    # Called, it is its first phase.
    assert schedule(sizes) == {"en-gl": 0.0, "en-es": 0.5, "gl-en": 0.0, "es-en": 0.5}
    assert samplers.plan(uniform, {"a": 2}) == [Phase(0, {"a": 1.0})]


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([(5, uniform, None)], "first steps = [5]: must be whole numbers from 0, rising"),
        ([], "first steps = []"),
        ([(0, uniform, None), (0, uniform, None)], "first steps = [0, 0]"),
        ([(0, uniform, None), (1.5, uniform, None)], "first steps = [0, 1.5]"),
        ([(0, uniform)], "must be (first step, sampler, languages)"),
        ([(0, 5.0, None)], "must be (first step, sampler, languages)"),
        ([(0, uniform, "gl")], "must be with a list of codes, or None"),
        ([(0, uniform, [])], "must be with a list of codes, or None"),
    ],
)
def test_schedule_errors(phases: list, said: str) -> None:
    with pytest.raises(ValueError) as error:
        Schedule(phases)
    assert said in str(error.value)


def test_a_schedule_of_unknown_languages_or_of_an_uninformed_unimax() -> None:
    with pytest.raises(ValueError) as error:
        Schedule([(0, uniform, ["gl", "xx"])])({"en-gl": 1, "en-es": 1})
    assert str(error.value) == (
        "Schedule.phases[0] = 'xx': must be a language or direction of gl, es"
    )
    with pytest.raises(ValueError, match=r"unimax\.budget = None"):
        Schedule([(0, unimax, None)])({"en-gl": 1})


# --------------------------------------------------------------------------- learned


def dev(**losses: float) -> dict[str, float]:
    return {"dev/nll": 9.0, **{f"dev/nll/en-{k}": v for k, v in losses.items()}}


def test_learned_by_hand() -> None:
    learned = Learned(start=uniform, step_size=math.log(4), floor=0.2)
    start = learned({"en-a": 5, "en-b": 1})
    state = learned.update(learned.begin(), dev(a=8.0, b=4.0))
    assert learned.rates(state, start) == pytest.approx(start)  # nothing to compare with
    # a falls by 1/4, b by 1/8: rewards 1/4 and 1/8, centred +1/16 and -1/16, scaled +1 and -1.
    # Weights 4 and 1/4: shares 16/17 and 1/17. With the floor .8 * 16/17 + .2 * .5 = .8529...
    state = learned.update(state, dev(a=6.0, b=3.5))
    assert learned.rates(state, start) == pytest.approx(
        {"en-a": 0.8 * 16 / 17 + 0.1, "en-b": 0.8 / 17 + 0.1}
    )
    assert learned.weights(state, ["en-a", "en-b"]) == pytest.approx({"en-a": 1.0, "en-b": 1 / 16})
    # Equal improvements move nothing.
    again = learned.update(state, dev(a=3.0, b=1.75))
    assert learned.rates(again, start) == learned.rates(state, start)


def test_a_direction_without_a_dev_set_keeps_its_weight() -> None:
    learned = Learned(start=uniform, step_size=1.0)
    state = learned.update(learned.begin(), dev(a=2.0, b=2.0))
    state = learned.update(state, dev(a=1.0, b=2.0))
    assert state["log_weights"] == {"en-a": 1.0, "en-b": -1.0}
    weights = learned.weights(state, ["en-a", "en-b", "en-c"])
    assert weights["en-c"] == pytest.approx(math.exp(-1))


def test_what_is_measured_at_other_times_is_not_forgotten() -> None:
    learned = Learned(start=uniform)
    state = learned.update(learned.begin(), dev(a=2.0, b=2.0))
    between = learned.update(state, {"dev/chrf/en-a": 30.0})
    assert between["log_weights"] == {}
    assert (
        learned.update(between, dev(a=1.0, b=2.0))["log_weights"]
        == learned.update(state, dev(a=1.0, b=2.0))["log_weights"]
        == {"en-a": 0.2, "en-b": -0.2}
    )


def test_the_loss_as_a_signal_follows_the_worst() -> None:
    learned = Learned(start=uniform, signal=loss)
    state = learned.update(learned.begin(), dev(a=1.0, b=3.0, c=2.0))  # from the first evaluation
    assert state["log_weights"] == pytest.approx({"en-a": -0.2, "en-b": 0.2, "en-c": 0.0})


def test_another_signal() -> None:
    def alignment(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
        return {k.removeprefix("align/"): v for k, v in now.items() if k.startswith("align/")}

    learned = Learned(signal=alignment, step_size=0.5)
    state = learned.update(learned.begin(), {"align/en-a": 0.9, "align/en-b": 0.1, "dev/nll": 3.0})
    assert state["log_weights"] == pytest.approx({"en-a": 0.5, "en-b": -0.5})


@given(
    st.lists(st.lists(st.floats(0.01, 20.0), min_size=3, max_size=3), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
)
def test_learned_rates_keep_their_floor_and_survive_json(
    losses: list[list[float]], floor: float
) -> None:
    learned = Learned(start=temperature, step_size=3.0, floor=floor)
    start = learned({"en-a": 1000, "en-b": 100, "en-c": 1})
    state = saved = learned.begin()
    for a, b, c in losses:
        state = learned.update(state, dev(a=a, b=b, c=c))
        saved = json.loads(json.dumps(learned.update(saved, dev(a=a, b=b, c=c))))
        rates = learned.rates(state, start)
        assert sum(rates.values()) == pytest.approx(1.0)
        assert all(rates[k] >= floor * start[k] * (1 - 1e-12) for k in start)
    # Exactly: what a checkpoint holds is what was there.
    assert learned.rates(saved, start) == learned.rates(state, start)


def test_learned_finds_the_one_that_can_be_learned() -> None:
    """Two directions: the loss of one falls when it is drawn, the other's is noise at its end."""
    learned = Learned(start=uniform)
    rng = np.random.default_rng(0)
    state, rates = learned.begin(), learned({"en-a": 1, "en-b": 1})
    start, left = dict(rates), 5.0
    for _ in range(30):
        left *= 1 - 0.2 * rates["en-a"]
        state = learned.update(state, dev(a=1 + left, b=2 + rng.normal(0, 1e-3)))
        rates = learned.rates(state, start)
    # The most it can be is .75 * 1 + .25 * .5 = .875.
    assert 0.8 < rates["en-a"] <= 0.875


def test_learned_errors() -> None:
    with pytest.raises(ValueError, match=r"Learned\.step_size = 0: must be a number above 0"):
        Learned(step_size=0)
    for floor in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"Learned\.floor = .*above 0 to 1"):
            Learned(floor=floor)
    with pytest.raises(ValueError, match=r"Learned\.start = .*a sampler without phases"):
        Learned(start=Schedule([(0, uniform, None)]))
    assert dataclasses.replace(Learned(), floor=1.0).floor == 1.0
    learned = Learned()
    state = learned.update(learned.begin(), dev(a=1.0, b=1.0))
    with pytest.raises(ValueError, match="no finite reward for en-b; training has diverged"):
        learned.update(state, dev(a=1.0, b=math.nan))
    assert improvement({}, dev(a=1.0)) == {}

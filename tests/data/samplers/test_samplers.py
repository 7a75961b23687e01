"""Laws of every sampler in the folder, and a case of each worked out by hand."""

import functools
import itertools
import json
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data import samplers
from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from m4.data.samplers import Kept, Phase, Planned, Sampler, kept_of
from m4.data.samplers.learned import Learned, improvement, loss
from m4.data.samplers.mixing_rates import mixing_rates
from m4.data.samplers.proportional import proportional
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.shares import Shares
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.samplers.unimax import unimax
from m4.data.sources import Pair
from m4.data.stream.mixture import make_stream
from m4.data.stream.stream import Stream
from m4.experiment import Data
from m4.settings import SettingError
from tests.data.arrays import same
from tests.data.corpus import Made

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
    "mixing_rates": [functools.partial(mixing_rates, rates={f"en-l{i}": 2.0 for i in range(30)})],
    "shares": [Shares({"en-*": 0.5}), Shares({"x-*": 0.2})],
}
ALL = [*itertools.chain(*BY_FILE.values()), Kept(temperature, (), 0.0)]
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


def test_shares_by_hand() -> None:
    sizes = {"en-gl": 1, "gl-en": 1, "en-es": 3, "es-en": 3}
    # Proportional: 1/8, 1/8, 3/8, 3/8; a side's proportions are 1 to 3.
    rates = Shares({"en-*": 0.8}, proportional)(sizes)
    assert rates == pytest.approx({"en-gl": 0.2, "gl-en": 0.05, "en-es": 0.6, "es-en": 0.15})
    assert list(rates) == list(sizes)
    # The first pattern counts, and 0.3 is left for the two that match none.
    rates = Shares({"gl-en": 0.5, "*-en": 0.2}, uniform)(sizes)
    assert rates == pytest.approx({"en-gl": 0.15, "gl-en": 0.5, "en-es": 0.15, "es-en": 0.2})
    # Shares of 1 together leave nothing for others.
    assert Shares({"gl-en": 1.0})(sizes)["en-gl"] == 0


@given(sizes=SIZES, share=st.floats(0.01, 0.99))
def test_shares_are_drawn_and_keep_proportions(sizes: dict[str, int], share: float) -> None:
    both = sizes | {f"{name.removeprefix('en-')}-en": size for name, size in sizes.items()}
    rates, inner = Shares({"en-*": share})(both), temperature(both)
    assert sum(rates[name] for name in sizes) == pytest.approx(share)
    for side, part in ((sizes, share), (both.keys() - sizes, 1 - share)):
        for name in side:
            assert rates[name] / part == pytest.approx(inner[name] * 2)  # each side has half there


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
    wanted = {"en-a": 0.8 * 16 / 17 + 0.1, "en-b": 0.8 / 17 + 0.1}
    assert learned.rates(state, start) == pytest.approx(wanted)
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


def test_the_loss_as_a_signal_follows_the_worst() -> None:
    learned = Learned(start=uniform, signal=loss)
    state = learned.update(learned.begin(), dev(a=1.0, b=3.0, c=2.0))  # from the first evaluation
    assert state["log_weights"] == pytest.approx({"en-a": -0.2, "en-b": 0.2, "en-c": 0.0})


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


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: temperature({"a": 1}, temperature=0.5), "temperature = 0.5: must be a number from 1"),
    (lambda: unimax({"a": 3, "b": 1}, 1.0, 12.0), "max_epochs = 1.0: must be at least 3, or train"),
    (lambda: unimax({"a": 3}), "unimax.budget = None: must be set here"),
    (lambda: Schedule([(0, unimax, None)])({"en-gl": 1}), "unimax.budget = None"),
    (lambda: Shares({"en-*": 0.6, "*-en": 0.6}), "must be shares of at most 1 together"),
    (lambda: Shares({"en-xx": 0.6})({"en-gl": 1}), "'en-xx': must be a direction of en-gl"),
    (lambda: Shares({"en-*": 0.0})({"en-gl": 1}), "must be a share for a direction here"),
    (lambda: Shares({"en-*": 0.5}, Learned()), "must be neither a sched"),
    (lambda: Schedule([(5, uniform, None)]), "first steps = [5]: must be whole numbers from 0"),
    (lambda: Schedule([(0, uniform, None)] * 2), "first steps = [0, 0]"),
    (lambda: Schedule([(0, uniform)]), "must be (first step, sampler, languages)"),  # type: ignore
    (lambda: Schedule([(0, uniform, ["xx"])])({"en-gl": 1}), "must be a language or direction of"),
    (lambda: Learned(start=Schedule([(0, uniform, None)])), "a sampler without phases"),
]


@pytest.mark.parametrize(("make", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_names_its_setting(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_a_loss_that_is_no_number_ends_learning() -> None:
    learned = Learned()
    state = learned.update(learned.begin(), dev(a=1.0, b=1.0))
    with pytest.raises(ValueError, match="no finite reward for en-b; training has diverged"):
        learned.update(state, dev(a=1.0, b=math.nan))
    assert improvement({}, dev(a=1.0)) == {}


def test_temperature_by_target_and_by_pair() -> None:
    """Sizes 9 and 1 into en and fr: at T=2 their roots, 3 : 1, and inside a target by size."""
    sizes = {"gl-en": 6, "pt-en": 3, "gl-fr": 1}
    rates = temperature(sizes, 2.0, by="target")
    assert rates == pytest.approx({"gl-en": 0.75 * 6 / 9, "pt-en": 0.75 * 3 / 9, "gl-fr": 0.25})
    # Pairs of 8 and 2 sentences: at T=1 as they are; at T=3 their cube roots, 2 : 2^(1/3).
    both = {"en-gl": 4, "gl-en": 4, "fr-wo": 1, "wo-fr": 1}
    assert temperature(both, 1.0, by="pair") == pytest.approx(proportional(both))
    share = 2 / (2 + 2 ** (1 / 3))
    by_pair = temperature(both, 3.0, by="pair")
    assert by_pair["en-gl"] == pytest.approx(share / 2)
    assert by_pair["fr-wo"] == pytest.approx((1 - share) / 2)


KEEP = ["pt", "sr_Latn-en"]
OLD = {"en-pt", "pt-en", "sr_Latn-en"}


def stream_of(cache: Cache, sampler: Sampler, sample_by: str = "examples") -> Stream:
    return make_stream(cache, sampler, sample_by, seed=3, batch_rows=8)


@pytest.mark.parametrize("sampler", [temperature, Shares({"en-*": 0.7})])
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_kept_directions_have_their_share_of_the_draws(
    made_cache: Cache, sampler: Sampler, share: float
) -> None:
    stream = stream_of(made_cache, Kept(sampler, KEEP, share))
    seen = stream.examples_seen(200)
    assert {*seen} == {*made_cache.directions}
    # The draws of whole blocks are off by at most 1 a direction, those of the last block (4,096)
    # as a random order leaves them: 4 standard deviations.
    old, total = sum(seen[name] for name in OLD), sum(seen.values())
    assert abs(old - share * total) <= len(seen) + 4 * np.sqrt(4096 * share * (1 - share))
    rates = Kept(sampler, KEEP, share)(made_cache.sizes())
    assert sum(rates[name] for name in OLD) == pytest.approx(share)
    within = sampler({n: s for n, s in made_cache.sizes().items() if n in OLD})
    assert {n: rates[n] / share for n in OLD} == pytest.approx(within)


@pytest.mark.parametrize("sample_by", ["examples", "tokens"])
def test_share_0_leaves_the_batches_bit_equal(made_cache: Cache, sample_by: str) -> None:
    def others(sizes: dict[str, int]) -> dict[str, float]:
        return temperature({n: size for n, size in sizes.items() if n not in OLD})

    kept = stream_of(made_cache, Kept(temperature, KEEP, 0.0), sample_by)
    alone = stream_of(made_cache, others, sample_by)
    assert kept.directions == alone.directions == ["en-gl", "en-sr_Latn", "gl-en"]
    assert kept.fingerprint() == alone.fingerprint()
    assert all(same(kept.batch(step), alone.batch(step)) for step in (0, 7, 30))


class TestSetsAlone(Made):
    """Source in which a language has no training pairs."""

    __test__ = False

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        if (pair, split) != ("en-pt", "train"):
            yield from super().pairs(pair, split)


@pytest.mark.parametrize("segmentations", [1, 2])
def test_a_kept_language_needs_no_training_pairs(tmp_path: Path, segmentations: int) -> None:
    lengths = {"inputs": 96, "targets": 96}
    spec = CorpusSpec(TestSetsAlone({"gl": 60, "pt": 30}), vocabulary_size=400, lengths=lengths,
                      segmentations=segmentations)  # fmt: skip
    with pytest.raises(ValueError, match="en-pt has no training pairs: the source has none"):
        spec.build(tmp_path)
    data = Data(spec, keep=["pt"])
    cache = spec.build(tmp_path, untrained=data.untrained)
    assert (cache.size("pt", "train"), cache.size("pt", "test") > 0) == (0, True)
    assert {*cache.length_factors} <= {"gl", "en"}
    for unit in ("examples", "tokens"):
        assert stream_of(cache, data.full_sampler, unit).directions == ["en-gl", "gl-en"]
    replay = Data(spec, keep=["pt"], keep_share=0.3)
    with pytest.raises(SettingError, match=r"Data.keep_share = 0.3: must be 0: no kept direction"):
        stream_of(cache, replay.full_sampler)


def test_what_cannot_be_kept(made: Made, made_cache: Cache) -> None:
    spec = CorpusSpec(made)
    with pytest.raises(SettingError, match=r"Data.keep_share = 0.3: must be 0 where Data.keep"):
        Data(spec, keep_share=0.3)
    with pytest.raises(SettingError, match=r"Data.keep = 'fr': must be a language or direction of"):
        kept_of(["fr"], made_cache.directions)
    with pytest.raises(SettingError, match=r"must be some of the directions, so that one"):
        stream_of(made_cache, Data(spec, keep=[*made.sizes]).full_sampler)

"""A sampler's rates on a corpus, by pairs and by tokens."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from m4.data.cache.cache import Cache
from m4.data.directions import ROLES, pair_of, sides_of
from m4.data.samplers import Phase
from m4.data.samplers.proportional import proportional
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.samplers.unimax import unimax
from m4.data.stream import mixture
from tests.data.arrays import tokens as tokens_of


def token_counts(cache: Cache) -> dict[str, int]:
    """Ids of all training pairs of each direction, tag and eos included, counted one by one."""
    counts = {}
    for direction in cache.directions:
        code = pair_of(direction)
        counts[direction] = 0
        for side, role in zip(sides_of(direction), ROLES, strict=True):
            _, offsets = tokens_of(cache, "train", side, role)
            for row in cache.rows(code, "train"):
                counts[direction] += int(offsets[row + 1] - offsets[row])
        counts[direction] += 3 * cache.size(code, "train")  # tag and two eos
    return counts


def test_sizes_by_tokens_are_the_tokens(made_cache: Cache) -> None:
    assert mixture.sizes(made_cache, "tokens") == token_counts(made_cache)
    assert mixture.sizes(made_cache, "examples") == made_cache.sizes()
    with pytest.raises(ValueError) as error:
        mixture.sizes(made_cache, "words")
    assert str(error.value) == ("make_stream.sample_by = 'words': must be one of examples, tokens")


def test_by_tokens_the_rates_are_shares_of_the_tokens(made_cache: Cache) -> None:
    unit = mixture.units(made_cache, "tokens")
    (phase,) = mixture.phases(made_cache, uniform, "tokens")
    tokens = {direction: rate * unit[direction] for direction, rate in phase.rates.items()}
    assert list(tokens.values()) == pytest.approx([sum(tokens.values()) / 6] * 6)
    # In proportion every pair is drawn as often as every other, whatever is counted.
    for sample_by in mixture.UNITS:
        (phase,) = mixture.phases(made_cache, proportional, sample_by)
        assert phase.rates == pytest.approx(proportional(made_cache.sizes()), rel=1e-4)
    (phase,) = mixture.phases(made_cache, temperature)
    assert phase.rates == pytest.approx(temperature(made_cache.sizes()))


@pytest.mark.parametrize(
    ("first_steps", "total_steps", "said"),
    [
        ((0, 257), 512, "257 never begins: .* multiples of 256 steps, and training has 512"),
        # Groups of 2,048 / 8 = 256 steps: 300 and 400 both wait for step 512.
        ((0, 300, 400), 2000, "300 never begins: .* 256 steps, and the next one begins at 512 too"),
        # With one more step it has one; a phase after the training is for a longer one.
        ((0, 257), 513, None),
        ((0, 600), 512, None),
        ((0, 300, 513), 2000, None),  # 512 and 768
    ],
)
def test_a_phase_that_never_begins_is_refused(
    made_cache: Cache, first_steps: tuple[int, ...], total_steps: int, said: str | None
) -> None:
    phases = Schedule(tuple((step, uniform, None) for step in first_steps))
    make = functools.partial(mixture.make_stream, made_cache, phases, total_steps=total_steps)
    if said is None:
        assert len(make(batch_rows=8)._phases.entries) == len(first_steps)
    else:
        with pytest.raises(ValueError, match=f"^the sampler's phase from step {said}$"):
            make(batch_rows=8)


def test_what_the_stream_then_holds(made_cache: Cache) -> None:
    stream = mixture.make_stream(made_cache, uniform, "tokens", seed=3, batch_rows=8)
    tokens = np.zeros(6)
    for step in range(100):
        batch = stream.batch(step)
        for ids, name in (("direction_ids", "decoder_target_tokens"),
                          ("encoder_direction_ids", "encoder_input_tokens")):  # fmt: skip
            tokens += np.bincount(batch[ids][batch[name] > 0], minlength=6)
    # About 100 * 8 * 180 tokens, 24,000 a direction and 700 pairs of it, whose lengths spread by
    # less than half: a standard error below 2%.
    assert tokens / tokens.sum() == pytest.approx(np.full(6, 1 / 6), rel=0.08)


def test_a_schedule_becomes_phases_of_pairs(made_cache: Cache) -> None:
    sampler = Schedule([(0, uniform, ["gl"]), (9, uniform, None)])
    unit = mixture.units(made_cache, "tokens")
    first, second = mixture.phases(made_cache, sampler, "tokens")
    weights = 1 / unit["en-gl"], 1 / unit["gl-en"]
    assert first == Phase(
        0, {"en-gl": weights[0] / sum(weights), "gl-en": weights[1] / sum(weights)}
    )
    assert second.first_step == 9
    assert list(second.rates) == made_cache.directions
    # The first phase that is called (as for seqio) has rate 0 for the rest; nothing draws it.
    assert mixture.pair_rates(sampler(made_cache.sizes()), unit) == first.rates


@pytest.mark.parametrize("sample_by", mixture.UNITS)
def test_unimax_keeps_its_bound_by_the_streams_own_count(made_cache: Cache, sample_by: str) -> None:
    steps = 120
    plain = mixture.make_stream(made_cache, proportional, batch_rows=4)
    times = 1.5 * max(plain.epochs(steps).values())  # room for one and a half of all pairs
    bounded = functools.partial(unimax, max_epochs=times)
    stream = mixture.make_stream(made_cache, bounded, sample_by, steps, batch_rows=4)
    epochs = stream.epochs(steps)
    # Whole blocks of draws hold the shares exactly, the last one is drawn at random: below a
    # binomial's standard error, of which four are allowed.
    off = {d: 4 * (times / pairs) ** 0.5 for d, pairs in made_cache.sizes().items()}
    assert all(epochs[direction] <= times + off[direction] for direction in off)
    # The smallest language reaches the bound, the largest does not.
    assert epochs["en-sr_Latn"] > times - off["en-sr_Latn"]
    assert epochs["en-gl"] < 0.9 * times

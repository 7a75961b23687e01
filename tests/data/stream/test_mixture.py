"""A sampler's rates on a corpus, by pairs and by tokens."""

import functools

import pytest

from m4.data.cache.cache import Cache
from m4.data.samplers.proportional import proportional
from m4.data.samplers.schedule import Schedule
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.data.samplers.unimax import unimax
from m4.data.stream import mixture
from tests.data.arrays import of_text


def token_counts(cache: Cache) -> dict[str, int]:
    """Counts the ids of all training pairs by direction, one by one, with tag and eos."""
    ids = {direction: of_text(cache, direction, "train") for direction in cache.directions}
    return {d: sum(len(side) for pair in pairs for side in pair) for d, pairs in ids.items()}


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

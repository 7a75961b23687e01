import numpy as np
import pytest

from m4.data.permutation import key, mix, permutation
from m4.data.stream import numba_loops
from m4.data.stream.draws import Draws
from m4.settings import SavedText
from tests.data import stream_reference

SIZES = [7, 100, 1000, 30_000]
RATES = [0.1, 0.2, 0.3, 0.4]


def make(seed: int = 0) -> Draws:
    return Draws(["en-a", "en-b", "en-c", "en-d"], SIZES, RATES, seed)


def test_any_stretch_is_the_same_draws() -> None:
    whole = np.stack(make().draw(0, 20_000))
    other = make()
    for start, stop in [(19_000, 20_000), (0, 1), (4095, 4097), (100, 9000), (50, 50)]:
        assert np.array_equal(np.stack(other.draw(start, stop)), whole[:, start:stop])
    far = make().draw(10**12, 10**12 + 100)
    assert np.array_equal(np.stack(far), np.stack(make().draw(10**12, 10**12 + 100)))


def test_shares_are_exact_after_every_block_and_near_everywhere() -> None:
    draws = make()
    directions = draws.draw(0, 10 * draws.block).directions
    for blocks in range(1, 11):
        counts = np.bincount(directions[: blocks * draws.block], minlength=4)
        assert np.abs(counts - np.array(RATES) * blocks * draws.block).max() < 1
    # Inside blocks they are draws without replacement: closer than binomial ones. 5 sigma.
    for stop in range(1000, len(directions), 777):
        counts = np.bincount(directions[:stop], minlength=4)
        sigma = np.sqrt(stop * np.array(RATES) * (1 - np.array(RATES)))
        assert (np.abs(counts - np.array(RATES) * stop) < 5 * sigma).all()
        assert draws.counts(stop) == counts.tolist()


def test_small_shares_make_the_block_larger() -> None:
    draws = Draws(["a", "b"], [5, 5], [1.0, 1e-5], 0)
    # 1e-5 of a block is at least one draw: 2^17 = 131,072 is the first power of two above 1e5.
    assert draws.block == 1 << 17
    assert draws.counts(100 * draws.block)[1] == pytest.approx(131, abs=1)
    said = r"^b: a share of 1\.0e-07 is too small, at least 9\.5e-07"
    with pytest.raises(ValueError, match=said):
        Draws(["a", "b"], [5, 5], [1.0, 1e-7], 0)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match=r"^b: no training pairs, but a rate of 0\.5"):
        Draws(["a", "b"], [5, 0], [0.5, 0.5], 0)
    for rate in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^a: the rate is .*: must be 0 or more"):
            Draws(["a", "b"], [5, 5], [rate, 0.5], 0)
    with pytest.raises(ValueError, match=r"^all rates are 0"):
        Draws(["a", "b"], [5, 5], [0.0, 0.0], 0)


def test_a_rate_of_0_is_not_drawn() -> None:
    for rates in ([0.0, 2.0, 1.0, 0.0], [2.0, 0.0, 0.0, 1.0]):
        draws = Draws(["a", "b", "c", "d"], [5, 5, 5, 5], rates, 0)
        counts = np.bincount(draws.draw(0, 9000).directions, minlength=4)
        assert counts.tolist() == draws.counts(9000)
        assert (counts > 0).tolist() == [rate > 0 for rate in rates]


def test_draws_continue_where_others_ended() -> None:
    """Two stretches of 1,000 draws at other rates: the epochs of each direction follow on."""
    first = make()
    second = Draws(first.names, SIZES, RATES[::-1], 0, first.counts(1000), phase=1)
    parts = first.draw(0, 1000), second.draw(0, 2000)
    assert second.counts(0) == first.counts(1000)
    directions, examples, epochs = (np.concatenate([a, b]) for a, b in zip(*parts, strict=True))
    assert second.counts(2000) == np.bincount(directions, minlength=4).tolist()
    for direction, size in enumerate(SIZES):
        drawn = examples[directions == direction]
        counted = epochs[directions == direction]
        assert np.array_equal(counted, np.arange(len(drawn)) // size)
        for start in range(0, len(drawn), size):
            assert len(set(drawn[start : start + size])) == len(drawn[start : start + size])
    other = Draws(first.names, SIZES, RATES, 0, phase=1)
    assert not np.array_equal(other.draw(0, 50), first.draw(0, 50))


def test_compiled_is_the_same() -> None:
    rng = np.random.default_rng(0)
    directions, before = rng.integers(0, 4, 3000), np.array([0, 10**12, 5, 999])
    occurrence = stream_reference.occurrences(directions, before)
    assert np.array_equal(numba_loops.occurrences(directions, before), occurrence)
    sizes, keys = np.array(SIZES, np.uint64), rng.integers(0, 2**64, 4, np.uint64)
    for window in (1 << 16, 64, 99):
        given = directions, occurrence, sizes, keys
        found = numba_loops.examples(*given, np.uint64(window))
        assert np.array_equal(found, stream_reference.examples(*given, window))


@pytest.mark.parametrize("size", [64, 65, 127, 128, 1000])
def test_windows_are_drawn_one_after_the_other(size: int) -> None:
    """Every example once an epoch; 64 consecutive draws are 64 neighbours, round the end."""
    draws = Draws(["a"], [size], [1.0], 3, window=64)
    drawn = draws.draw(0, 3 * size).examples.reshape(3, size)
    for epoch in drawn:
        assert np.array_equal(np.sort(epoch), np.arange(size))
        for start in range(0, size - 63, 64):
            places = np.sort(epoch[start : start + 64])
            gaps = np.diff(places, append=places[0] + size)
            assert size == 64 or np.sort(gaps)[-1] == size - 63, "all others lie in one gap"
    windows = {frozenset(epoch[:64].tolist()) for epoch in drawn}
    assert size == 64 or len(windows) > 1, "not the same windows in each epoch"


# Keyed random numbers and permutations.


def test_mix_is_splitmix64() -> None:
    # The first two outputs of Vigna's splitmix64.c from state 0; its state grows by the constant
    # that mix adds, so the second output is mix of that constant.
    state = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(x) for x in mix(state)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 100, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    index, of = np.arange(size, dtype=np.uint64), key("k", size)
    places = numba_loops.permute_each(index, np.uint64(size), np.uint64(of))
    assert sorted(places) == sorted(permutation(size, of)) == list(range(size))


def test_text_of_a_saved_config_gives_the_same_key() -> None:
    assert key("vocabulary", SavedText("es")) == key("vocabulary", "es") != key("vocabulary", 3)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 2**33 + 1, 2**62])
def test_compiled_permutations_are_the_same(size: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.uint64))
    keys = mix(np.arange(len(index), dtype=np.uint64))
    wanted = [stream_reference.mix(int(k)) for k in keys]
    assert [int(numba_loops.mix(k)) for k in keys] == mix(keys).tolist() == wanted
    for i, k in zip(index, keys, strict=True):
        place = int(numba_loops.permute(i, np.uint64(size), k))
        assert place == stream_reference.permute(int(i), size, int(k))


def test_keys_differ_and_stay() -> None:
    assert len({key(1), key("1"), key(1, 1), key(11), key("a", 1), key("a1")}) == 6
    # Frozen: a checkpoint's stream must be the same stream in the next version.
    assert key("epoch", 0, "en-gl") == 11644592413519607977

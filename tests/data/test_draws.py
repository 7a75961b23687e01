from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from m4.data.draws import Draws

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


def test_seeds_differ() -> None:
    first, second = make(0).draw(0, 1000), make(1).draw(0, 1000)
    assert (first[0] != second[0]).mean() > 0.5


def test_shares_are_exact_after_every_block_and_near_everywhere() -> None:
    draws = make()
    directions, _ = draws.draw(0, 10 * draws.block)
    for blocks in range(1, 11):
        counts = np.bincount(directions[: blocks * draws.block], minlength=4)
        assert np.abs(counts - np.array(RATES) * blocks * draws.block).max() < 1
    # Inside blocks they are draws without replacement: closer than binomial ones. 5 sigma.
    for stop in range(1000, len(directions), 777):
        counts = np.bincount(directions[:stop], minlength=4)
        sigma = np.sqrt(stop * np.array(RATES) * (1 - np.array(RATES)))
        assert (np.abs(counts - np.array(RATES) * stop) < 5 * sigma).all()
        assert draws.counts(stop) == counts.tolist()


def test_every_example_once_before_any_twice() -> None:
    directions, examples = make().draw(0, 60_000)
    for direction, size in enumerate(SIZES):
        drawn = examples[directions == direction]
        epochs = [drawn[i : i + size] for i in range(0, len(drawn) - size + 1, size)]
        # 60,000 draws: 6,000 of 7, 12,000 of 100, 18,000 of 1,000; of the 30,000 not all.
        assert len(epochs) == pytest.approx(60_000 * RATES[direction] / size, abs=1, rel=0.05)
        for epoch in epochs:
            assert np.array_equal(np.sort(epoch), np.arange(size))
        assert all((a != b).any() for a, b in pairwise(epochs)), (
            "each epoch has an order of its own"
        )
        assert len(set(drawn[len(epochs) * size :].tolist())) == len(drawn) - len(epochs) * size


def test_small_shares_make_the_block_larger() -> None:
    draws = Draws(["a", "b"], [5, 5], [1.0, 1e-5], 0)
    # 1e-5 of a block is at least one draw: 2^17 = 131,072 is the first power of two above 1e5.
    assert draws.block == 1 << 17
    assert draws.counts(100 * draws.block)[1] == pytest.approx(131, abs=1)
    with pytest.raises(
        ValueError, match=r"^b: a share of 1\.0e-07 is too small, at least 9\.5e-07"
    ):
        Draws(["a", "b"], [5, 5], [1.0, 1e-7], 0)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match=r"^b: 0 examples at rate 0\.5: both must be above 0"):
        Draws(["a", "b"], [5, 0], [0.5, 0.5], 0)
    with pytest.raises(ValueError, match=r"^a: 5 examples at rate 0\.0"):
        Draws(["a", "b"], [5, 5], [0.0, 0.5], 0)

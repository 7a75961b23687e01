"""BASE's gate: the auction against scipy's optimum and against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from m4.model.gates.base import auction, base
from tests.model.gates.golden import slots, tokens_of

solve = jax.jit(lambda scores_GSE: auction(scores_GSE, jnp.ones(scores_GSE.shape[:2], bool)))
gate = jax.jit(lambda logits, mask: base(tokens_of(logits, mask, train=True), 4, slots(99)))


def best_value(scores_SE: np.ndarray) -> float:
    """Returns the exact optimum: each expert stands for as many columns as it gets tokens."""
    share = scores_SE.shape[0] // scores_SE.shape[1]
    columns_SS = np.repeat(scores_SE, share, axis=1)
    return columns_SS[linear_sum_assignment(columns_SS, maximize=True)].sum()


def value(scores_SE: np.ndarray, expert_S: np.ndarray) -> float:
    return scores_SE[np.arange(len(scores_SE)), expert_S].sum()


def scores_of(kind: str, G: int, S: int, E: int) -> np.ndarray:
    rng = np.random.default_rng(S + E)
    scores = rng.normal(size=(G, S, E))
    if kind == "low rank":  # what a router of a narrow model gives: tokens and experts alike
        scores = rng.normal(size=(G, S, 4)) @ rng.normal(size=(4, E))
    if kind == "one favourite":
        scores = 0.1 * scores
        scores[..., 0] += 5.0
    if kind == "large and far off":
        scores = 100.0 * scores + 1000.0
    return scores.astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("normal", (20, 8, 4)),
        ("normal", (8, 64, 8)),
        ("normal", (4, 256, 32)),
        ("normal", (2, 12, 12)),
        ("low rank", (4, 64, 16)),
        ("one favourite", (4, 64, 4)),
        ("large and far off", (8, 64, 8)),
    ],
)
def test_within_half_a_percent_of_the_optimum_and_exactly_balanced(kind, shape):
    scores_GSE = scores_of(kind, *shape)
    expert_GS, rounds = solve(scores_GSE)
    _, S, E = shape
    for scores_SE, expert_S in zip(scores_GSE, np.asarray(expert_GS), strict=True):
        assert np.bincount(expert_S, minlength=E).tolist() == [S // E] * E
        best = best_value(scores_SE)
        # What is lost, next to what the assignment is worth: over random ones, whose mean is the
        # mean score. An offset shared by all does not flatter it.
        worth = best - S * scores_SE.mean()
        assert value(scores_SE, expert_S) >= best - 0.005 * worth
    assert rounds < 400  # it was not cut short


def loops(scores_SE: np.ndarray) -> list[int] | None:
    """Runs the auction with lists and loops; returns None if it takes more than 400 rounds."""
    S, E = scores_SE.shape
    share, least = S // E, np.float32(1.0 / 200)
    scores_SE = scores_SE - scores_SE.mean(axis=1, keepdims=True)
    scores_SE = scores_SE - scores_SE.mean(axis=0, keepdims=True)
    low, high = scores_SE.min(), scores_SE.max()
    scores = ((scores_SE - low) / (high - low)).astype(np.float32)
    cost, bidder = np.zeros(S, np.float32), [-1] * S
    for _ in range(400):
        bids: list[dict[int, np.float32]] = [{} for _ in range(S)]
        for e in range(E):
            worth = [np.float32(1) if bidder[s] == e else scores[s, e] - cost[s] for s in range(S)]
            # Stable: of two alike the one that comes first, counted from the expert's own start.
            order = sorted(((e * share + i) % S for i in range(S)), key=lambda s: -worth[s])
            for s in order[:share]:
                bids[s][e] = worth[s] - worth[order[share]] + least
        for s in range(S):
            if bidder[s] >= 0:
                bids[s][bidder[s]] = least
        for s in range(S):
            if bids[s]:
                winner = max(bids[s], key=lambda e: (bids[s][e], -e))
                stays = winner == bidder[s]
                cost[s] += np.float32(0.2) * bids[s][winner] if stays else bids[s][winner]
                bidder[s] = winner
            else:
                bidder[s] = -1
        if min(bidder) >= 0:
            return bidder
    return None


@pytest.mark.parametrize("shape", [(8, 4), (24, 3), (64, 8)])
def test_equals_the_auction_in_loops(shape):
    scores_GSE = np.random.default_rng(7).normal(size=(3, *shape)).astype(np.float32)
    expert_GS, _ = solve(scores_GSE)
    for scores_SE, expert_S in zip(scores_GSE, np.asarray(expert_GS), strict=True):
        assert expert_S.tolist() == loops(scores_SE)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_cut_short_it_is_still_balanced(rounds, monkeypatch):
    monkeypatch.setattr("m4.model.gates.base._MOST_ROUNDS", rounds)
    scores_GSE = np.random.default_rng(1).normal(size=(4, 64, 8)).astype(np.float32)
    expert_GS, took = jax.jit(lambda *given: auction(*given))(scores_GSE, np.ones((4, 64), bool))
    assert took == rounds
    for expert_S in np.asarray(expert_GS):
        assert np.bincount(expert_S, minlength=8).tolist() == [8] * 8


def test_where_all_score_alike_it_takes_one_round():
    expert_GS, rounds = solve(np.zeros((8, 64, 8), np.float32))
    assert rounds == 1
    assert np.bincount(np.asarray(expert_GS)[0], minlength=8).tolist() == [8] * 8


def test_real_tokens_are_balanced_whatever_the_padding():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 22, 4)).astype(np.float32)  # 22 tokens: C = 6, and two dummies
    mask = rng.random((6, 22)) < rng.random((6, 1))
    mask[0] = True
    mask[1] = False
    mask[2] = np.arange(22) == 5
    routing = jax.device_get(gate(logits, mask))
    assert routing.capacity == 6
    expert = np.asarray(routing.expert_GSK[..., 0])
    np.testing.assert_array_equal(np.asarray(routing.position_GSK[..., 0]) >= 0, mask)
    for g in range(6):
        counts = np.bincount(expert[g][mask[g]], minlength=4)
        assert counts.max() - counts.min() <= 1
        # The optimum of the real tokens alone, with these numbers of them.
        places = np.repeat(logits[g][mask[g]].astype(np.float64), counts, axis=1)
        best = places[linear_sum_assignment(places, maximize=True)].sum()
        assert value(logits[g][mask[g]], expert[g][mask[g]]) >= best - 0.005 * abs(best)
    # What padding scores does not matter.
    other = gate(np.where(mask[..., None], logits, 50.0).astype(np.float32), mask)
    np.testing.assert_array_equal(other.position_GSK, routing.position_GSK)
    np.testing.assert_array_equal(other.weight_GSK, routing.weight_GSK)

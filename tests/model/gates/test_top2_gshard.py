"""GShard's gate: golden outputs of other implementations, and a case by hand."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from m4.model.dispatch import einsum
from m4.model.gates.top2_gshard import route, top2_gshard
from m4.model.routing import Routing, expert_capacity
from m4.settings import SettingError
from tests.model.gates.golden import (
    CASES,
    PROBS,
    assert_same_plan,
    at_once,
    groups_over_real_groups,
    read,
    slots,
    tokens_of,
)

# --- Golden outputs -------------------------------------------------------------------------------

OPTIONS = ("policy", "paper_slot", "normalize", "real_token_means")
planned = jax.jit(route, static_argnames=("num_experts", "capacity", *OPTIONS))

PAPER: dict[str, dict[str, Any]] = {
    "paper": {"policy": "random", "paper_slot": True},
    "paper_freeseat": {"policy": "random"},
    "all": {"policy": "all"},
    "all_after": {"policy": "all", "normalize": "after"},
    "random_after": {"policy": "random", "normalize": "after"},
    "none": {"policy": "none"},
}
LINGVO: dict[str, dict[str, Any]] = {
    "all_legacy": {"policy": "all"},
    "random_legacy": {"policy": "random"},
    "sampling_legacy": {"policy": "sampling"},
    "all_nonlegacy": {"policy": "all", "normalize": "after", "real_token_means": True},
    "random_nonlegacy": {"policy": "random", "normalize": "after", "real_token_means": True},
}
REAL_TOKENS: dict[str, Any] = {"policy": "all", "real_token_means": True}
DEFAULTS = {"paper_slot": False, "normalize": "before", "real_token_means": False}


@functools.cache
def plans(case: str) -> dict[str, Routing]:
    """Variant -> plan. All of a case as one program: they have most operations in common."""
    names = ("logits", "paddings", "uniform", "gumbel_u")
    logits_GSE, paddings_GS, *uniform = (read("inputs")[f"{case}/{name}"] for name in names)
    C = int(read("inputs")[f"{case}/capacity"])

    @jax.jit
    def run(logits_GSE, mask_GS, uniform_GS, uniform_GSE):
        return {
            name: route(
                logits_GSE,
                mask_GS,
                uniform_GSE if options["policy"] == "sampling" else uniform_GS,
                logits_GSE.shape[-1],
                C,
                **{**DEFAULTS, **options},
            )
            for name, options in {**PAPER, **LINGVO, "real tokens": REAL_TOKENS}.items()
        }

    return run(logits_GSE, paddings_GS == 0, *uniform)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", PAPER)
def test_equals_algorithm_1(case, variant):
    alg1 = read("alg1")
    expected = {
        key: alg1[f"{case}/alg1/{variant}/{key}"] for key in ("combine", "dispatch", "l_aux_paper")
    }
    routing = plans(case)[variant]
    assert_same_plan(routing, expected["combine"], expected["dispatch"])
    # The paper divides by E, m4 multiplies: 1 is balance.
    scaled = expected["l_aux_paper"] * routing.num_experts**2
    np.testing.assert_allclose(routing.aux_loss, scaled, rtol=2e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", LINGVO)
def test_equals_lingvo(case, variant):
    lingvo = read("lingvo")
    expected = {key: lingvo[f"{case}/{variant}/{key}"] for key in ("combine", "dispatch", "aux")}
    routing = plans(case)[variant]
    assert_same_plan(routing, expected["combine"], expected["dispatch"], where="weight")
    aux = float(expected["aux"])
    if LINGVO[variant].get("real_token_means"):
        aux *= groups_over_real_groups(case)
    # Lingvo adds 1e-6 to both denominators.
    np.testing.assert_allclose(routing.aux_loss, aux, rtol=3e-6)


def test_real_token_means_equal_algorithm_1_over_real_tokens():
    expected = float(read("alg1")["pad/alg1/all_nonpad/l_aux_paper"]) * 8**2
    expected *= groups_over_real_groups("pad")
    np.testing.assert_allclose(plans("pad")["real tokens"].aux_loss, expected, rtol=2e-6)


def test_the_masks_of_einsum_are_the_papers():
    # `einsum` carries by these.
    combine_GSEC, dispatch_GSEC = jax.jit(einsum.masks)(plans("overflow")["paper"])
    expected = "overflow/alg1/paper"
    np.testing.assert_array_equal(dispatch_GSEC, read("alg1")[f"{expected}/dispatch"])
    np.testing.assert_allclose(combine_GSEC, read("alg1")[f"{expected}/combine"], atol=2e-6)


def test_capacity_equals_lingvos():
    # Lingvo's factor counts both choices (2.0 is the paper's 2S/E); and it gives four slots to a
    # group of fewer tokens, where m4 gives as many as there are tokens.
    for tokens, experts, factor, most in read("lingvo")["capacity_probe"]:
        got = expert_capacity(int(tokens), int(experts), factor / 2)
        assert got == min(tokens, most), (tokens, experts, factor)


# --- By hand --------------------------------------------------------------------------------------

# Two slots each. The rows of PROBS; the best two experts; g1, g2 = their shares:
#   t0  .6 .3 .1   experts 0, 1   2/3, 1/3
#   t1  .5 .1 .4   experts 0, 2   5/9, 4/9
#   t2  .7 .2 .1   experts 0, 1   7/9, 2/9
#   t3  .2 .5 .3   experts 1, 2   5/8, 3/8
# First choices in order: expert 0 takes t0 (0) and t1 (1), t2 finds it full; expert 1 takes t3 (0).
# Coins: 2 g2 = .667, .889, .444, .75 against these: t1 and t2 win, t0 and t3 lose.
COINS = [[0.7, 0.5, 0.3, 0.8]]


def by_hand(mask_GS=((True,) * 4,), **options) -> Routing:
    options = {
        "policy": "random",
        "paper_slot": False,
        "normalize": "before",
        "real_token_means": True,
        **options,
    }
    logits_GSE = np.log(PROBS).astype(np.float32)
    return planned(logits_GSE, np.asarray(mask_GS), np.asarray(COINS), 3, 2, **options)


def test_by_hand_a_refused_second_expert_frees_its_slot():
    # Second choices: t1 gets slot 0 of expert 2; t2 gets slot 1 of expert 1, after t3.
    routing = by_hand()
    assert routing.expert_GSK[0].tolist() == [[0, 1], [0, 2], [0, 1], [1, 2]]
    assert routing.position_GSK[0].tolist() == [[0, -1], [1, 0], [-1, 1], [0, -1]]
    np.testing.assert_allclose(
        routing.weight_GSK[0], [[2 / 3, 0], [5 / 9, 4 / 9], [0, 2 / 9], [5 / 8, 0]], atol=1e-6
    )
    # Shares of first choices (3/4, 1/4, 0), mean probabilities (.5, .275, .225):
    # 3 * (.75 * .5 + .25 * .275) = 1.33125.
    np.testing.assert_allclose(routing.aux_loss, 1.33125, rtol=1e-6)
    np.testing.assert_allclose(routing.metrics["first_overflow"], 1 / 4)
    np.testing.assert_allclose(routing.metrics["second_dropped"], 2 / 4)
    np.testing.assert_allclose(routing.metrics["fraction_tokens_left_behind"], 0)


def test_underflown_probabilities_never_choose_an_expert_twice():
    # softmax gives 1, 0, 0 in float32; the second best is still expert 2, by its logit.
    tokens = tokens_of([[[0.0, -300.0, -200.0]]])
    assert at_once(top2_gshard, tokens, 3, slots(1)).expert_GSK.tolist() == [[[0, 2]]]


def test_the_policy_is_random_in_training_only():
    logits = np.tile([[[1.0, -1.0]]], (1, 64, 1))  # g2 = 1 / (1 + e^2) = .119

    def seconds(**options):
        routing = at_once(top2_gshard, tokens_of(logits, **options), 2, slots(64))
        return int(np.sum(np.asarray(routing.position_GSK)[..., 1] >= 0))

    assert seconds(train=False) == 64
    with pytest.raises(SettingError, match="without random numbers"):
        seconds(train=True)
    # Accepted with probability 2 * .119 = .238: 15 of 64, and 6 standard deviations are 20.
    assert 1 <= seconds(train=True, rng=jax.random.key(0)) <= 35


@pytest.mark.parametrize("policy", ["random", "sampling"])
def test_every_token_of_every_group_draws_its_own_second_expert(policy):
    """Tokens are all alike; equal draws would be made of one random number."""
    logits = np.tile([[[1.0, 0.0, -0.5]]], (4, 64, 1))
    tokens = tokens_of(logits, train=True, rng=jax.random.key(0))
    routing = at_once(top2_gshard, tokens, 3, slots(64), second_policy=policy)
    second_GS = np.asarray(routing.expert_GSK)[..., 1] * 2 + (
        np.asarray(routing.position_GSK)[..., 1] >= 0
    )
    assert len({tuple(row) for row in second_GS.tolist()}) == 4
    assert all(len({*row}) > 1 for row in second_GS.tolist())


def test_balance_scores_one():
    # Every expert is the clear first choice of S/E = 2 tokens: shares 1/E, and by symmetry mean
    # probabilities 1/E, so that E * sum = 1 whatever the logits' size.
    logits = np.broadcast_to(3.0 * np.eye(4)[np.arange(8) % 4], (2, 8, 4))
    routing = at_once(top2_gshard, tokens_of(logits), 4, slots(8))
    np.testing.assert_allclose(routing.aux_loss, 1.0, rtol=1e-6)
    # z-loss by its definition: log(e^3 + 3)^2.
    np.testing.assert_allclose(routing.z_loss, math.log(math.e**3 + 3) ** 2, rtol=1e-6)

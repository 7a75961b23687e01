"""GShard's gate: golden outputs of other implementations, and a case by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.gates.top2_gshard import route, top2_gshard
from m4.model.routing import Routing, Tokens, expert_capacity
from tests.model.gates.golden import CASES, PROBS, assert_same_plan, read

# --- Golden outputs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden():
    return {name: read(name) for name in ("inputs", "alg1", "lingvo")}


def plan(golden, case, **options: Any) -> Routing:
    names = ("logits", "paddings", "uniform", "gumbel_u")
    inputs = {key: golden["inputs"][f"{case}/{key}"] for key in names}
    uniform = inputs["gumbel_u" if options["policy"] == "sampling" else "uniform"]
    return route(
        jnp.asarray(inputs["logits"]),
        jnp.asarray(inputs["paddings"]) == 0,
        jnp.asarray(uniform),
        inputs["logits"].shape[-1],
        int(golden["inputs"][f"{case}/capacity"]),
        **{"paper_seat": False, "normalize": "before", "real_token_means": False, **options},
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("paper", {"policy": "random", "paper_seat": True}),
        ("paper_freeseat", {"policy": "random"}),
        ("all", {"policy": "all"}),
        ("all_after", {"policy": "all", "normalize": "after"}),
        ("random_after", {"policy": "random", "normalize": "after"}),
        ("none", {"policy": "none"}),
    ],
)
def test_equals_algorithm_1(golden, case, variant, options):
    expected = {
        key: golden["alg1"][f"{case}/alg1/{variant}/{key}"]
        for key in ("combine", "dispatch", "l_aux_paper")
    }
    routing = plan(golden, case, **options)
    assert_same_plan(routing, expected["combine"], expected["dispatch"])
    # The paper divides by E, m4 multiplies: 1 is balance.
    scaled = expected["l_aux_paper"] * routing.num_experts**2
    np.testing.assert_allclose(routing.aux_loss, scaled, rtol=2e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("all_legacy", {"policy": "all"}),
        ("random_legacy", {"policy": "random"}),
        ("sampling_legacy", {"policy": "sampling"}),
        ("all_nonlegacy", {"policy": "all", "normalize": "after", "real_token_means": True}),
        ("random_nonlegacy", {"policy": "random", "normalize": "after", "real_token_means": True}),
    ],
)
def test_equals_lingvo(golden, case, variant, options):
    expected = {
        key: golden["lingvo"][f"{case}/{variant}/{key}"] for key in ("combine", "dispatch", "aux")
    }
    routing = plan(golden, case, **options)
    assert_same_plan(routing, expected["combine"], expected["dispatch"], where="weight")
    aux = float(expected["aux"])
    # Lingvo adds 1e-6 to both denominators.
    np.testing.assert_allclose(routing.aux_loss, aux, rtol=3e-6)


def test_real_token_means_equal_algorithm_1_over_real_tokens(golden):
    expected = float(golden["alg1"]["pad/alg1/all_nonpad/l_aux_paper"])
    routing = plan(golden, "pad", policy="all", real_token_means=True)
    np.testing.assert_allclose(routing.aux_loss, expected * 8**2, rtol=2e-6)


def test_capacity_equals_lingvos(golden):
    # Lingvo's factor counts both choices (2.0 is the paper's 2S/E); and it gives four seats to a
    # group of fewer tokens, where m4 gives as many as there are tokens.
    for tokens, experts, factor, seats in golden["lingvo"]["capacity_probe"]:
        got = expert_capacity(int(tokens), int(experts), factor / 2)
        assert got == min(tokens, seats), (tokens, experts, factor)


# --- By hand --------------------------------------------------------------------------------------

# Two seats each. The rows of PROBS; the best two experts; g1, g2 = their shares:
#   t0  .6 .3 .1   experts 0, 1   2/3, 1/3
#   t1  .5 .1 .4   experts 0, 2   5/9, 4/9
#   t2  .7 .2 .1   experts 0, 1   7/9, 2/9
#   t3  .2 .5 .3   experts 1, 2   5/8, 3/8
# First choices in order: expert 0 seats t0 (0) and t1 (1), t2 finds it full; expert 1 seats t3 (0).
# Coins: 2 g2 = .667, .889, .444, .75 against these: t1 and t2 win, t0 and t3 lose.
COINS = [[0.7, 0.5, 0.3, 0.8]]


def by_hand(**options) -> Routing:
    logits = jnp.log(jnp.asarray(PROBS, jnp.float32))
    options = {
        "policy": "random",
        "paper_seat": False,
        "normalize": "before",
        "real_token_means": True,
        **options,
    }
    return route(logits, jnp.ones((1, 4), bool), jnp.asarray(COINS), 3, 2, **options)


def test_by_hand_a_refused_second_expert_frees_its_seat():
    # Second choices: t1 gets seat 0 of expert 2; t2 gets seat 1 of expert 1, after t3.
    routing = by_hand()
    assert routing.expert_GSK[0].tolist() == [[0, 1], [0, 2], [0, 1], [1, 2]]
    assert routing.seat_GSK[0].tolist() == [[0, -1], [1, 0], [-1, 1], [0, -1]]
    np.testing.assert_allclose(
        routing.weight_GSK[0], [[2 / 3, 0], [5 / 9, 4 / 9], [0, 2 / 9], [5 / 8, 0]], atol=1e-6
    )
    # Shares of first choices (3/4, 1/4, 0), mean probabilities (.5, .275, .225):
    # 3 * (.75 * .5 + .25 * .275) = 1.33125.
    np.testing.assert_allclose(routing.aux_loss, 1.33125, rtol=1e-6)
    np.testing.assert_allclose(routing.metrics["first_overflow"], 1 / 4)
    np.testing.assert_allclose(routing.metrics["second_dropped"], 2 / 4)
    np.testing.assert_allclose(routing.metrics["nowhere"], 0)


def test_by_hand_paper_seat():
    # t0 uses up seat 1 of expert 1 although it was refused: t2 is left with nothing. (Line 22.)
    routing = by_hand(paper_seat=True)
    assert routing.seat_GSK[0].tolist() == [[0, -1], [1, 0], [-1, -1], [0, -1]]
    np.testing.assert_allclose(routing.metrics["nowhere"], 1 / 4)


def test_by_hand_normalize_after():
    # The coin sees the raw p2: 2 p2 = .6, .8, .4, .6 against .7, .5, .3, .8: the same two win.
    # Then survivors share alone: t1 keeps both (5/9, 4/9), the other three have one expert: 1.
    routing = by_hand(normalize="after")
    np.testing.assert_allclose(
        routing.weight_GSK[0], [[1, 0], [5 / 9, 4 / 9], [0, 1], [1, 0]], atol=1e-6
    )


def test_by_hand_padding():
    # Without t0, expert 0 has a seat for t2. Means are over three tokens: shares (2/3, 1/3, 0),
    # mean probabilities (1.4, .8, .8) / 3: 3 * (2/3 * 1.4/3 + 1/3 * .8/3) = 1.2.
    mask = jnp.asarray([[False, True, True, True]])
    logits = jnp.log(jnp.asarray(PROBS, jnp.float32))
    routing = route(
        logits,
        mask,
        None,
        3,
        2,
        policy="all",
        paper_seat=False,
        normalize="before",
        real_token_means=True,
    )
    assert routing.seat_GSK[0].tolist() == [[-1, -1], [0, 0], [1, 1], [0, 1]]
    np.testing.assert_allclose(routing.aux_loss, 1.2, rtol=1e-6)
    assert routing.weight_GSK[0, 0].tolist() == [0, 0]


def test_underflown_probabilities_never_choose_an_expert_twice():
    # softmax gives 1, 0, 0 in float32; the second best is still expert 2, by its logit.
    logits = jnp.asarray([[[0.0, -300.0, -200.0]]])
    tokens = Tokens(score=lambda name, **_: logits, mask_GS=jnp.ones((1, 1), bool))
    assert top2_gshard(tokens, 3, lambda choices: 1).expert_GSK.tolist() == [[[0, 2]]]


def test_bad_arguments():
    tokens = Tokens(score=lambda name, **_: jnp.zeros((1, 1, 2)), mask_GS=jnp.ones((1, 1), bool))
    with pytest.raises(ValueError, match=r"top2_gshard\.eval_second_policy: 'some'"):
        top2_gshard(tokens, 2, lambda choices: 1, eval_second_policy="some")
    with pytest.raises(ValueError, match="2 is not between 1 and 1, the experts"):
        top2_gshard(tokens, 1, lambda choices: 1)
    with pytest.raises(ValueError, match=r"top2_gshard\.normalize: 'never'"):
        top2_gshard(tokens, 2, lambda choices: 1, normalize="never")


def test_the_policy_is_random_in_training_only():
    logits = jnp.tile(jnp.asarray([[[1.0, -1.0]]]), (1, 64, 1))  # g2 = 1 / (1 + e^2) = .119
    mask = jnp.ones((1, 64), bool)

    def seconds(**options):
        tokens = Tokens(score=lambda name, **_: logits, mask_GS=mask, **options)
        return int(jnp.sum(top2_gshard(tokens, 2, lambda choices: 64).seat_GSK[..., 1] >= 0))

    assert seconds(train=False) == 64
    assert seconds(train=True) == 64  # no key: deterministic
    # Accepted with probability 2 * .119 = .238: 15 of 64, and 6 standard deviations are 20.
    assert 1 <= seconds(train=True, rng=jax.random.key(0)) <= 35


def test_balance_scores_one():
    # Every expert is the clear first choice of S/E = 2 tokens: shares 1/E, and by symmetry mean
    # probabilities 1/E, so that E * sum = 1 whatever the logits' size.
    logits = jnp.broadcast_to(3.0 * jax.nn.one_hot(jnp.arange(8) % 4, 4)[None], (2, 8, 4))
    tokens = Tokens(score=lambda name, **_: logits, mask_GS=jnp.ones((2, 8), bool))
    np.testing.assert_allclose(top2_gshard(tokens, 4, lambda choices: 8).aux_loss, 1.0, rtol=1e-6)
    # z-loss by its definition: log(e^3 + 3)^2.
    np.testing.assert_allclose(
        top2_gshard(tokens, 4, lambda choices: 8).z_loss, math.log(math.e**3 + 3) ** 2, rtol=1e-6
    )

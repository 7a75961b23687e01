"""GShard's gate: golden outputs of other implementations."""

import functools
import math
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from m4.model.dispatch import einsum
from m4.model.gates.top2_gshard import top2_gshard
from m4.model.routing import Routing, expert_capacity
from m4.settings import SettingError
from tests.model.gates.golden import (
    CASES,
    assert_same_plan,
    at_once,
    groups_over_real_groups,
    read,
    slots,
    tokens_of,
)

PAPER: dict[str, dict[str, Any]] = {
    "paper": {"second_policy": "random", "paper_slot": True},
    "paper_freeseat": {"second_policy": "random"},
    "all": {"second_policy": "all"},
    "all_after": {"second_policy": "all", "normalize": "after"},
    "random_after": {"second_policy": "random", "normalize": "after"},
    "none": {"second_policy": "none"},
}
LINGVO: dict[str, dict[str, Any]] = {
    "all_legacy": {"second_policy": "all"},
    "random_legacy": {"second_policy": "random"},
    "sampling_legacy": {"second_policy": "sampling"},
    "all_nonlegacy": {"second_policy": "all", "normalize": "after", "real_token_means": True},
    "random_nonlegacy": {"second_policy": "random", "normalize": "after", "real_token_means": True},
}
MORE: dict[str, dict[str, Any]] = {
    "real tokens": {"second_policy": "all", "real_token_means": True},
    "paper scale": {**PAPER["paper"], "paper_scale": True},
}
DEFAULTS: dict[str, Any] = {"paper_slot": False, "normalize": "before", "real_token_means": False}


@functools.cache
def plans(case: str) -> dict[str, Routing]:
    """Returns variant -> plan, from one program per case, as variants share most operations."""
    names = ("logits", "paddings", "uniform", "gumbel_u")
    logits_GSE, paddings_GS, *uniform = (read("inputs")[f"{case}/{name}"] for name in names)
    capacity = slots(int(read("inputs")[f"{case}/capacity"]))

    @jax.jit
    def run(logits_GSE, mask_GS, uniform_GS, uniform_GSE):
        given = {2: uniform_GS, 3: uniform_GSE}
        tokens = tokens_of(logits_GSE, mask_GS, train=True, rng=jax.random.key(0))
        with mock.patch("jax.random.uniform", lambda key, shape, minval: given[len(shape)]):
            return {
                name: top2_gshard(tokens, logits_GSE.shape[-1], capacity, **DEFAULTS | options)
                for name, options in {**PAPER, **LINGVO, **MORE}.items()
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
def test_the_papers_scale_is_algorithm_1s(case):
    expected = read("alg1")[f"{case}/alg1/paper/l_aux_paper"]
    np.testing.assert_allclose(plans(case)["paper scale"].aux_loss, expected, rtol=2e-6)


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
    scaled = at_once(top2_gshard, tokens_of(logits), 4, slots(8), paper_scale=True)
    np.testing.assert_allclose(scaled.aux_loss, 1 / 4**2, rtol=1e-6)
    # z-loss by its definition: log(e^3 + 3)^2.
    np.testing.assert_allclose(routing.z_loss, math.log(math.e**3 + 3) ** 2, rtol=1e-6)

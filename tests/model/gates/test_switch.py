"""Switch's gate: golden outputs, a case by hand, jitter, who gets the slots."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from m4.model.gates.ktop1 import ktop1
from m4.model.gates.switch import switch
from m4.model.gates.topk import topk
from m4.model.routing import Tokens
from tests.model.gates.golden import (
    CASES,
    PROBS,
    assert_same_plan,
    at_once,
    balance_by_loops,
    best,
    golden_tokens,
    groups_over_real_groups,
    random_case,
    read,
    slots,
    slots_by_loops,
    softmax,
    tokens_of,
    tokens_of_probs,
)
from tests.shared import small_layer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("gate", "options"),
    [(switch, {}), (topk, {"choices": 1}), (ktop1, {"prototypes": 1})],
    ids=["switch", "topk", "ktop1"],
)
def test_equals_a_transcription_of_the_paper(case, gate, options):
    """So do the gates of k experts, for one of them."""
    alg1 = read("alg1")
    tokens, E, C = golden_tokens(read("inputs"), case)
    routing = at_once(gate, tokens, E, slots(C), **options)
    combine = alg1[f"{case}/alg1/switch/combine"]
    assert_same_plan(routing, combine, combine != 0, where="weight")
    # GShard's loss counts first choices too; times E^2 it is 1 when balanced. With padding: over
    # real tokens.
    variant = "all_nonpad" if case == "pad" else "none"
    expected = alg1[f"{case}/alg1/{variant}/l_aux_paper"] * E**2
    expected *= groups_over_real_groups(case)
    np.testing.assert_allclose(routing.aux_loss, expected, rtol=2e-6)


def test_by_hand():
    # Best experts of the four tokens: 0, 0, 0, 1 with p = .6, .5, .7, .5. Two slots each: t0 and t1
    # sit at expert 0, t2 finds it full, t3 sits at expert 1. Weights are p itself.
    routing = at_once(switch, tokens_of_probs(PROBS), 3, slots(2))
    assert routing.expert_GSK[0, :, 0].tolist() == [0, 0, 0, 1]
    assert routing.position_GSK[0, :, 0].tolist() == [0, 1, -1, 0]
    np.testing.assert_allclose(routing.weight_GSK[0, :, 0], [0.6, 0.5, 0, 0.5], atol=1e-6)
    # f = (3/4, 1/4, 0), before capacity; P = (2.0, 1.1, .9) / 4:
    # 3 * (.75 * .5 + .25 * .275) = 1.33125.
    np.testing.assert_allclose(routing.aux_loss, 1.33125, rtol=1e-6)
    # The logits are logarithms of probabilities that sum to 1.
    np.testing.assert_allclose(routing.z_loss, 0, atol=1e-6)
    np.testing.assert_allclose(routing.metrics["first_overflow"], 1 / 4)


@pytest.mark.parametrize("priority", ["order", "probability"])
def test_equals_loops(priority):
    logits, mask = random_case(3, G=4, S=16, E=4)
    routing = at_once(switch, tokens_of(logits, mask), 4, slots(3), priority=priority)
    probs, expert = softmax(logits), best(logits, 1)
    by = probs.max(axis=-1) if priority == "probability" else None
    slot = slots_by_loops(expert, mask, 3, priority=by)
    assert (slot < 0)[mask].any()  # some are dropped
    np.testing.assert_array_equal(routing.position_GSK, slot)
    expected = probs.max(axis=-1, keepdims=True) * (slot >= 0)
    np.testing.assert_allclose(routing.weight_GSK, expected, atol=2e-6)
    np.testing.assert_allclose(routing.aux_loss, balance_by_loops(probs, expert, mask), rtol=2e-6)
    z = np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    np.testing.assert_allclose(routing.z_loss, z[mask].mean(), rtol=2e-6)


@pytest.mark.parametrize(
    ("train", "rng", "jitter"), [(True, 0, 0.1), (True, None, 0), (False, 0, 0), (False, None, 0)]
)
def test_jitter_in_training_only(train, rng, jitter):
    asked = []
    tokens = tokens_of_probs(PROBS, train=train, rng=None if rng is None else jax.random.key(rng))
    score = lambda name, **how: (asked.append(how["jitter"]), tokens.score(name))[1]  # noqa: E731
    asking = replace(tokens, score=score)
    jax.eval_shape(lambda: switch(asking, 3, slots(2), jitter=0.1))
    assert asked == [jitter]


def test_jitter_scales_what_the_router_sees_and_nothing_else():
    # Width 1: the logits are x u w with u ~ U(.75, 1.25), so that their ratio to x w is u.
    asked = []

    def gate(tokens: Tokens, num_experts, capacity):
        def score(*arguments, **how):
            asked.append(tokens.score(*arguments, **how))
            return asked[-1]

        return switch(replace(tokens, score=score), num_experts, capacity, jitter=0.25)

    layer = small_layer(mlp_width=3, gate=gate)
    x_BLM, mask_BL = np.full((8, 32, 1), 2.0, np.float32), np.ones((8, 32), bool)

    @jax.jit
    def evaluation_and_training():
        params = layer.init(jax.random.key(0), x_BLM, mask_BL, deterministic=True)["params"]
        asked.clear()
        rngs = {"dropout": jax.random.key(1)}
        outputs = [
            layer.apply({"params": params}, x_BLM, mask_BL, deterministic=not train, rngs=rngs)
            for train in (False, True)
        ]
        return outputs, asked

    outputs, seen = jax.device_get(evaluation_and_training())
    plain, jittered = (np.ravel(y_BLM) for y_BLM in outputs)
    u_SE = np.asarray(seen[1]).reshape(256, 4) / np.asarray(seen[0]).reshape(256, 4)
    np.testing.assert_allclose(u_SE, np.broadcast_to(u_SE[:, :1], u_SE.shape), rtol=1e-5)
    u = u_SE[:, 0]
    assert u.dtype == np.float32
    # One draw a token and entry of x, the same for all experts: 256 draws.
    assert len(np.unique(np.round(u, 5))) > 200
    assert (u > 0.75 - 1e-5).all()
    assert (u < 1.25 + 1e-5).all()
    # Standard deviation of U(.75, 1.25) is .5 / sqrt(12) = .144; of 256 draws' mean .009.
    assert abs(u.mean() - 1) < 0.045
    # The expert's input is not jittered: outputs p_e FFN_e(x) differ by the ratio of p_e only.
    first, second = (np.ravel(softmax(logits).max(axis=-1)) for logits in seen)
    kept = jittered != 0  # training drops some
    assert kept.any()
    np.testing.assert_allclose((jittered / plain)[kept], (second / first)[kept], rtol=1e-4)

"""The mixture-of-experts layer: groups, capacity, metrics, types."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from m4.model.dispatch.einsum import einsum
from m4.model.dispatch.gather import gather
from m4.model.gates.mixtral import mixtral
from m4.model.moe import MoeLayer
from m4.model.routing import expert_capacity
from m4.settings import SettingError
from m4.train.program import draw_together
from tests.shared import run_layer, small_layer

M = 6


def layer(**options: Any) -> MoeLayer:
    return small_layer(**{"group_tokens": 8, **options})


def inputs(seed=0, B=3, L=8, padding=True):
    rng = np.random.default_rng(seed)
    mask = np.arange(L)[None] < rng.integers(1, L + 1, (B, 1)) if padding else np.ones((B, L), bool)
    return jnp.asarray(rng.normal(size=(B, L, M)), jnp.float32), jnp.asarray(mask)


apply = jax.jit(run_layer, static_argnums=0, static_argnames="train")


@partial(jax.jit, static_argnames="model")
def init(model, x_BLM, mask_BL):
    make = draw_together(partial(model.init, deterministic=True))
    return make(jax.random.key(0), x_BLM, mask_BL)["params"]


def test_layer_without_drops_is_a_mixture_of_its_two_best_experts():
    model = layer()
    x_BLM, mask_BL = inputs()
    params = init(model, x_BLM, mask_BL)
    y_BLM, metrics = apply(model, params, x_BLM, mask_BL)
    # Straight from the definition, token by token, in numpy.
    w_in, w_out = (np.asarray(params["experts"][name]["kernel"]) for name in ("wi", "wo"))
    router = np.asarray(params["router"]["kernel"])
    x, real = np.asarray(x_BLM), np.asarray(mask_BL)
    expected, largest = np.zeros_like(x), []
    for b, t in zip(*np.nonzero(real), strict=True):
        logits = x[b, t] @ router
        best = np.argsort(-logits)[:2]
        shares = np.exp(logits[best]) / np.exp(logits[best]).sum()
        largest.append(shares[0])
        for share, e in zip(shares, best, strict=True):
            expected[b, t] += share * np.maximum(x[b, t] @ w_in[e], 0) @ w_out[e]
    np.testing.assert_allclose(y_BLM, expected, atol=1e-5)
    confidence = metrics["router_confidence"]
    np.testing.assert_allclose(confidence, np.mean(largest), rtol=1e-5)


@pytest.mark.parametrize("activations", [("relu",), ("silu", "linear")])
def test_a_shared_expert_is_added_for_every_real_token(activations):
    # Slots for few tokens: the others have the shared expert alone.
    options = {"activations": activations, "train_capacity_factor": 0.25, "capacity_rule": "paper"}
    routed, model = layer(**options), layer(**options, shared_width=7)
    x_BLM, mask_BL = inputs()
    params = init(model, x_BLM, mask_BL)
    own = {name: tree for name, tree in params.items() if name != "shared"}
    kernels = {name: np.asarray(tree["kernel"]) for name, tree in params["shared"].items()}
    x = np.asarray(x_BLM)
    if len(activations) == 1:
        h = np.maximum(x @ kernels["wi"], 0)
    else:
        gate = x @ kernels["wi_0"]
        h = gate / (1 + np.exp(-gate)) * (x @ kernels["wi_1"])
    shared = h @ kernels["wo"] * np.asarray(mask_BL)[..., None]
    for train in (False, True):
        y_BLM, metrics = apply(model, params, x_BLM, mask_BL, train=train)
        its_BLM, its = apply(routed, own, x_BLM, mask_BL, train=train)
        np.testing.assert_allclose(y_BLM, np.asarray(its_BLM) + shared, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, metrics, its)
    assert (~np.asarray(its_BLM).any(axis=-1) & np.asarray(mask_BL)).any()  # some have no slot


def test_group_boundaries_do_not_matter_without_drops():
    # For 32 tokens: all, the largest divisor up to 5, and 16.
    x_BLM, mask_BL = inputs(B=4)
    params = init(layer(), x_BLM, mask_BL)
    results = [apply(layer(group_tokens=size), params, x_BLM, mask_BL)[0] for size in (0, 5, 16)]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-6)


def test_capacity_in_training_and_evaluation():
    # 32 tokens in one group, all alike: all want the same two experts.
    x_BLM = jnp.ones((4, 8, M))
    mask_BL = jnp.ones((4, 8), bool)
    model = layer(group_tokens=0, train_capacity_factor=0.5)
    params = init(model, x_BLM, mask_BL)
    # Training: 2 * 32 * .5 / 4 = 8 slots an expert, so the first 8 tokens; 24 are dropped.
    y_BLM, metrics = apply(model, params, x_BLM, mask_BL, train=True)
    y_SM = np.asarray(y_BLM).reshape(32, M)
    assert y_SM[:8].any(axis=1).all()
    assert not y_SM[8:].any()
    np.testing.assert_allclose(metrics["fraction_tokens_left_behind"], 24 / 32)
    # Evaluation drops nothing, and so gives every token the same.
    y_BLM, metrics = apply(model, params, x_BLM, mask_BL)
    y_SM = np.asarray(y_BLM).reshape(32, M)
    np.testing.assert_allclose(y_SM, np.broadcast_to(y_SM[:1], y_SM.shape), atol=1e-6)
    np.testing.assert_allclose(metrics["fraction_tokens_left_behind"], 0)
    # 64 assigned choices of 4 experts * 32 slots.
    np.testing.assert_allclose(metrics["expert_usage"], 64 / 128)
    # A factor makes evaluation drop like training: the same 8 slots.
    limited = layer(group_tokens=0, eval_capacity_factor=0.5)
    y_BLM, _ = apply(limited, params, x_BLM, mask_BL)
    assert not np.asarray(y_BLM).reshape(32, M)[8:].any()
    # Decoding has a separate factor: here the 4 rows' position, all alike, and one slot.
    one_B1M, mask_B1 = x_BLM[:, :1], mask_BL[:, :1]
    for factors, assigned in (
        ({"decode_capacity_factor": 0.5}, 1),  # 2 * 4 * .5 / 4 = 1
        ({"decode_capacity_factor": 1.0}, 2),
        ({"eval_capacity_factor": 0.5}, 4),
        ({}, 4),
    ):
        limited = layer(group_tokens=0, capacity_rule="paper", **factors)
        decode = jax.jit(partial(limited.apply, deterministic=True, decode=True))
        y_B1M = np.asarray(decode({"params": params}, one_B1M, mask_B1))
        assert y_B1M.any(axis=(1, 2)).tolist() == [b < assigned for b in range(4)]


@pytest.mark.parametrize(
    ("options", "train", "decode", "used"),
    [
        ({}, True, False, "dispatch"),
        ({}, False, False, "dropless_dispatch"),
        ({}, False, True, "dropless_dispatch"),
        ({"train_capacity_factor": None}, True, False, "dropless_dispatch"),
        ({"eval_capacity_factor": 2.0}, False, False, "dispatch"),
        ({"decode_capacity_factor": 2.0}, False, True, "dispatch"),
    ],
)
def test_where_nothing_is_dropped_another_dispatch_is_used(options, train, decode, used):
    called = []

    def named(name):
        def run(x_GSM, routing, experts):
            called.append(name)
            return gather(x_GSM, routing, experts)

        return run

    names = ("dispatch", "dropless_dispatch")
    model = layer(**options, **{name: named(name) for name in names})
    x_BLM, mask_BL = inputs()
    params = init(layer(), x_BLM, mask_BL)
    run = partial(model.apply, deterministic=not train, decode=decode)
    jax.eval_shape(run, {"params": params}, x_BLM, mask_BL, rngs={"dropout": jax.random.key(0)})
    assert called == [used]


@pytest.mark.parametrize(
    ("rule", "slots"),
    # The exact shares K * S * factor / E of the three: 2 * 10 * 1 / 8 = 2.5, 2 * 50 * 1 / 8 = 12.5,
    # 1 * 45 * 1.25 / 4 = 14.0625.
    [
        ("paper", [3, 13, 15]),
        ("lingvo", [4, 12, 16]),
        ("flaxformer", [4, 12, 14]),  # 12.5 to even
    ],
)
def test_capacity_rules_by_hand(rule, slots):
    shapes = [(10, 8, 1.0, 2), (50, 8, 1.0, 2), (45, 4, 1.25, 1)]
    assert [expert_capacity(*shape, rule) for shape in shapes] == slots
    # Never more than tokens.
    assert expert_capacity(3, 1, 2.0, 2, rule) == 3


def test_a_layer_outside_a_model_needs_its_own_sizes():
    with pytest.raises(
        SettingError, match=r"^MoeLayer\.activations = \(\): must be at least one of"
    ):
        layer(activations=())
    x_BLM, mask_BL = inputs()
    with pytest.raises(SettingError, match=r"^MoeLayer\.mlp_width = None"):
        init(layer(mlp_width=None), x_BLM, mask_BL)


def test_groups_of_a_token_or_two_are_refused():
    # 1,031 is a prime: its groups would have one token each, and a slot at every expert.
    x_BLM, mask_BL = inputs(B=1, L=1031, padding=False)
    made = layer(group_tokens=256)
    params = init(layer(), *inputs())
    run = partial(made.apply, deterministic=False, rngs={"dropout": jax.random.key(0)})
    with pytest.raises(SettingError, match=r"^MoeLayer.group_tokens = 256: .* of the 1031 tokens"):
        jax.eval_shape(run, {"params": params}, x_BLM, mask_BL)
    # Where nothing is dropped a group is a row, of any length.
    for B, L in ((1, 1031), (300, 1)):
        x_BLM, mask_BL = inputs(B=B, L=L, padding=False)
        jax.eval_shape(partial(made.apply, deterministic=True), {"params": params}, x_BLM, mask_BL)


class Mine(nn.Module):
    """A model that is not m4's, with the layer."""

    @nn.compact
    def __call__(self, x_BLM, mask_BL):
        h_BLM = nn.Dense(M)(x_BLM)
        experts = layer(gate=mixtral, dispatch=einsum)
        return nn.Dense(1)(h_BLM + experts(h_BLM, mask_BL, deterministic=True))


def test_any_flax_model_can_take_the_layer():
    model, (x_BLM, mask_BL) = Mine(), inputs()
    params = model.init(jax.random.key(0), x_BLM, mask_BL)["params"]

    def total(params):
        return jnp.sum(jnp.square(jnp.asarray(model.apply({"params": params}, x_BLM, mask_BL))))

    gradients = jax.jit(jax.grad(total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    (experts,) = (found for name, found in gradients.items() if name.startswith("MoeLayer"))
    assert np.asarray(experts["experts"]["wi"]["kernel"]).any()

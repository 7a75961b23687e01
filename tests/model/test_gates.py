"""Laws for every gate in the folder, and for the layer with it: a new file is tested as such."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from m4.model import gates
from m4.model.routing import Routing, Tokens
from m4.parallel.mesh import make_mesh
from m4.settings import SettingError
from tests.model.compiled_step import products
from tests.model.gates.golden import slots
from tests.shared import parts_in, run_layer, small_layer

GATES = parts_in(gates)
# Options that move slots, weights or losses; the defaults are tested in any case.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"normalize": True, "batch_priority": True}),
    ("topk", {"choices": 3}),
    ("noisy_topk", {"choices": 4}),
    ("sam", {"choices": 1}),
    ("deepseek", {"choices": 1, "expert_groups": 2}),
    ("deepseek", {"scores": "softmax", "normalize": False, "expert_groups": 4, "best_groups": 3}),
    ("dense_to_sparse", {"anneal_steps": 7}),  # over: the step of `tokens_of` is 7
]
EVERY = {
    **GATES,
    **{
        "-".join([name, *options]): functools.partial(GATES[name], **options)
        for name, options in OPTIONS
    },
}
G, S, E = 8, 8, 4
# Gates that decide themselves how many slots there are: whether in training, slots given -> C.
OWN_CAPACITY = {
    "base": lambda train, given: S // E if train else S,
    "dense_to_sparse": lambda train, given: S if train else given,
    "expert_choice": lambda train, given: 2 * S // E,
}
# Experts choose tokens: a token may have no expert however many slots there are.
EXPERTS_CHOOSE = {"expert_choice"}
# Decoders refuse them.
LOOK_AHEAD = {"expert_choice", "topk-normalize-batch_priority"}
# Nothing is learnt.
WITHOUT_ROUTER = {"hash"}


def name_of(gate) -> str:
    return getattr(gate, "func", gate).__name__


def make_table(name: str, make: Callable[[int], Any]) -> jax.Array:
    return jnp.asarray(make(50), jnp.int32)


@functools.cache  # one function a number: a program that was compiled with it is found again
def biases_of(experts: int) -> Callable[[], jax.Array]:
    return lambda: jnp.asarray(np.resize([0.2, -0.1, 0.0, 0.3], experts), jnp.float32)


def no_score(name: str, **_: Any) -> jax.Array:
    raise AssertionError(name)


def tokens_of(
    seed: int, *, train: bool, key: bool, scale=2.0, mask=None, shape=(G, S, E)
) -> Tokens:
    rng = np.random.default_rng(seed)
    logits = {}

    def score(name, **_):
        if name not in logits:
            rng = np.random.default_rng([seed, len(logits)])
            logits[name] = rng.normal(0, scale, shape).astype(np.float32)
        return jnp.asarray(logits[name])

    if mask is None:
        mask = rng.random((G, S)) < rng.choice([0.3, 0.8, 1.0], (G, 1))
        mask[0] = False  # a group of padding alone
    return Tokens(
        score=score, mask_GS=jnp.asarray(mask),
        ids_GS=jnp.asarray(rng.integers(0, 50, shape[:2]), jnp.int32),
        rng=jax.random.key(seed) if key else None, table=make_table, bias=biases_of(shape[-1]),
        step=jnp.asarray(7, jnp.int32) if train else None, train=train,
    )  # fmt: skip


every_gate = pytest.mark.parametrize("gate", EVERY.values(), ids=EVERY.keys())
seeds = st.integers(0, 2**31)


def assert_same(a: Routing, b: Routing, atol=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=atol), a, b)


@every_gate
@settings(max_examples=15)
@given(
    seed=seeds,
    capacity=st.sampled_from([1, 3, 8]),
    mode=st.sampled_from([(True, True), (False, False)]),
)
def test_law_plan(gate, seed, capacity, mode):
    tokens = tokens_of(seed, train=mode[0], key=mode[1])
    routing = gate(tokens, E, slots(capacity))
    expert, slot, weight = (
        np.asarray(x) for x in (routing.expert_GSK, routing.position_GSK, routing.weight_GSK)
    )
    assert expert.shape == slot.shape == weight.shape
    assert expert.shape[:2] == (G, S)
    assert (expert.dtype, slot.dtype, weight.dtype) == (np.int32, np.int32, np.float32)
    assert routing.aux_loss.shape == routing.z_loss.shape == ()
    assert routing.aux_loss.dtype == routing.z_loss.dtype == jnp.float32
    if name_of(gate) in OWN_CAPACITY:
        capacity = OWN_CAPACITY[name_of(gate)](mode[0], capacity)
    assert (routing.num_experts, routing.capacity) == (E, capacity)
    assert {"fraction_tokens_left_behind"} <= routing.metrics.keys()
    assert ((expert >= 0) & (expert < E)).all()
    assert ((slot >= -1) & (slot < capacity)).all()
    assert ((weight >= 0) & (weight <= 1)).all()
    assert (weight[slot < 0] == 0).all()
    # A token's choices are different experts; a slot holds one token at most.
    for g in range(G):
        assigned = [
            (int(e), int(c)) for e, c in zip(expert[g].flat, slot[g].flat, strict=True) if c >= 0
        ]
        assert len(assigned) == len(set(assigned))
    # Padding has no slot.
    assert (slot[~np.asarray(tokens.mask_GS)] == -1).all()
    real = np.asarray(tokens.mask_GS)
    left_behind = ((slot < 0).all(axis=-1) & real).sum() / max(real.sum(), 1)
    found = routing.metrics["fraction_tokens_left_behind"]
    np.testing.assert_allclose(found, left_behind, atol=1e-6)


@every_gate
@settings(max_examples=10)
@given(seed=seeds)
def test_law_unlimited_capacity_drops_nothing(gate, seed):
    tokens = tokens_of(seed, train=False, key=False)
    full, more = gate(tokens, E, slots(S)), gate(tokens, E, slots(2 * S))
    assigned = np.asarray(full.position_GSK) >= 0
    if name_of(gate) in EXPERTS_CHOOSE:  # each its share: as many as the others
        shares = assigned.sum(axis=1)
        np.testing.assert_array_equal(shares, np.broadcast_to(shares[:, :1], shares.shape))
        assert (shares.any(axis=1) == np.asarray(tokens.mask_GS).any(axis=1)).all()
    else:
        assert assigned[np.asarray(tokens.mask_GS)].all()
    np.testing.assert_array_equal(full.expert_GSK, more.expert_GSK)
    np.testing.assert_array_equal(full.weight_GSK, more.weight_GSK)


@every_gate
@settings(max_examples=10)
@given(seed=seeds)
def test_law_padding_is_invisible(gate, seed):
    tokens = tokens_of(seed, train=False, key=False)
    real_GS1 = tokens.mask_GS[..., None]
    score, ids_GS = tokens.score, tokens.ids_GS
    assert ids_GS is not None
    other = replace(
        tokens,
        score=lambda name, **_: jnp.where(real_GS1, score(name), 9.0),
        ids_GS=jnp.where(tokens.mask_GS, ids_GS, 7),
    )
    a, b = gate(tokens, E, slots(3)), gate(other, E, slots(3))
    np.testing.assert_array_equal(a.position_GSK, b.position_GSK)
    np.testing.assert_allclose(a.weight_GSK, b.weight_GSK, atol=1e-6)
    np.testing.assert_allclose(a.aux_loss, b.aux_loss, atol=1e-6)
    np.testing.assert_allclose(a.z_loss, b.z_loss, rtol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_law_a_group_of_padding_alone_changes_no_loss(name):
    tokens = tokens_of(4, train=False, key=False)
    assert not tokens.mask_GS[0].any()
    assert tokens.ids_GS is not None
    without = replace(
        tokens, score=lambda name, **_: tokens.score(name)[1:], mask_GS=tokens.mask_GS[1:],
        ids_GS=tokens.ids_GS[1:],
    )  # fmt: skip
    a, b = (EVERY[name](given, E, slots(3)) for given in (tokens, without))
    np.testing.assert_allclose(a.aux_loss, b.aux_loss, rtol=1e-6)
    np.testing.assert_allclose(a.z_loss, b.z_loss, rtol=1e-6)


@functools.cache
def program(name: str, grad: bool):
    """Compiles a gate: scores and tokens -> plan and, with `grad`, d total / d scores.

    total is the mean weight + the losses.
    """

    def total(scores, tokens: Tokens):
        routing = EVERY[name](replace(tokens, score=lambda name, **_: scores[name]), E, slots(3))
        return jnp.mean(routing.weight_GSK) + routing.aux_loss + routing.z_loss, routing

    if grad:
        return jax.jit(jax.grad(total, has_aux=True))
    return jax.jit(lambda scores, tokens: total(scores, tokens)[1])


def arguments(name: str, tokens: Tokens) -> tuple[dict[str, jax.Array], Tokens]:
    """Returns a program's arguments: the scores that the gate needs, and the rest of the tokens."""
    asked: list[str] = []

    def score(name, **_):
        asked.append(name)
        return tokens.score(name)

    jax.eval_shape(lambda: EVERY[name](replace(tokens, score=score), E, slots(3)))
    scores = {name: tokens.score(name) for name in dict.fromkeys(asked)}
    return scores, replace(tokens, score=no_score)


@pytest.mark.parametrize("name", EVERY)
def test_law_gradients_are_finite_and_jit_equals_eager(name):
    for scale in (1.0, 100.0):
        tokens = tokens_of(3, train=True, key=True, scale=scale)
        gradients, routing = program(name, grad=True)(*arguments(name, tokens))
        if scale == 1.0:
            assert_same(EVERY[name](tokens, E, slots(3)), routing, atol=1e-6)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, routing)))
        assert bool(gradients) == (name not in WITHOUT_ROUTER)
        padding_GS = ~np.asarray(tokens.mask_GS)
        for gradient in gradients.values():
            # Padding has no influence.
            assert not np.asarray(gradient)[padding_GS].any()
            assert scale != 1.0 or np.asarray(gradient).any()


@pytest.mark.parametrize("name", EVERY)
def test_law_eight_devices_equal_one(name):
    tokens = tokens_of(5, train=True, key=True)
    rows = NamedSharding(make_mesh(data=8), PartitionSpec("data"))
    scores, bare = arguments(name, tokens)
    placed = jax.tree.map(lambda x: jax.device_put(x, rows) if x.ndim else x, (scores, bare))
    eight = program(name, grad=False)(*placed)
    assert_same(EVERY[name](tokens, E, slots(3)), eight, atol=1e-6)


NOT_ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("by_direction", {"choices": 5}),
    ("deepseek", {"expert_groups": 3}),
    ("deepseek", {"best_groups": 2}),
    ("deepseek", {"choices": 5}),
    ("dense_to_sparse", {"tau_min": 3.0}),  # above tau_max
    ("ktop1", {"prototypes": 3}),  # does not divide the four experts
    ("mixtral", {"choices": 5}),
    ("noisy_topk", {"choices": 5}),
    ("sam", {"expert_groups": 3}),
    ("sam", {"choices": 3}),  # a group has two experts
    ("topk", {"choices": 5}),
]


@pytest.mark.parametrize(("name", "options"), NOT_ALLOWED, ids=str)
def test_options_that_cannot_be_are_refused_by_name(name, options):
    with pytest.raises(SettingError) as error:
        GATES[name](tokens_of(0, train=False, key=False), E, slots(2), **options)
    assert [error.value.setting] == [f"{name}.{option}" for option in options]


def test_top2_needs_two_experts():
    with pytest.raises(SettingError, match=r"^MoeLayer\.num_experts = 1: must be at least 2"):
        GATES["top2_gshard"](tokens_of(0, train=False, key=False), 1, slots(2))


@pytest.mark.parametrize("name", EVERY)
def test_law_causal_or_refused(name):
    """In a decoder a token's plan does not depend on later ones; or else the gate refuses."""
    tokens = replace(tokens_of(6, train=False, key=False), causal=True)
    ids_GS = tokens.ids_GS
    assert ids_GS is not None
    later_S = np.arange(S) >= S // 2
    changed = replace(
        tokens,
        score=lambda name, **_: jnp.where(
            later_S[None, :, None], -tokens.score(name), tokens.score(name)
        ),
        ids_GS=jnp.where(later_S[None], 49 - ids_GS, ids_GS),
    )
    if name in LOOK_AHEAD:
        with pytest.raises(SettingError, match="looks at later tokens"):
            EVERY[name](tokens, E, slots(S))
        return
    gate = EVERY[name]
    a, b = gate(tokens, E, slots(S)), gate(changed, E, slots(S))
    a, b = jax.device_get((a, b))
    np.testing.assert_array_equal(a.expert_GSK[:, ~later_S], b.expert_GSK[:, ~later_S])
    np.testing.assert_array_equal(a.weight_GSK[:, ~later_S], b.weight_GSK[:, ~later_S])


# --- The layer with each gate -----------------------------------------------------


@functools.cache
def layer_program(name: str):
    """Returns a program and its arguments x_BLM and mask_BL.

    For evaluation and for training, with the same parameters, the program returns ((sum of squared
    outputs + losses, outputs), gradients of parameters and x).
    """
    sizes = {"num_experts": E, "group_tokens": S, "vocab_size": 50, "directions": 3}
    layer = small_layer(gate=GATES[name], **sizes)
    rng = np.random.default_rng(0)
    x_BLM = rng.normal(size=(2, S, 6)).astype(np.float32)
    mask_BL = rng.random((2, S)) < 0.8
    ids_BL = rng.integers(0, 50, (2, S)).astype(np.int32)
    direction_BL = rng.integers(0, 3, (2, S)).astype(np.int32)

    @jax.jit
    def outputs_and_gradients(x_BLM, mask_BL):
        key = jax.random.key(0)
        variables = layer.init(key, x_BLM, mask_BL, ids_BL, deterministic=True)

        def total(params, x_BLM, train):
            tokens = x_BLM, mask_BL, ids_BL, direction_BL
            step = jnp.asarray(3) if train else None
            y_BLM, metrics = run_layer(layer, params, *tokens, train=train, step=step)
            losses = metrics["auxiliary_loss"] + metrics["router_z_loss"]
            return jnp.sum(jnp.square(y_BLM)) + losses, (y_BLM, metrics)

        both = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
        return [both(variables["params"], x_BLM, train) for train in (False, True)]

    return outputs_and_gradients, (x_BLM, mask_BL)


@pytest.mark.parametrize("name", GATES)
def test_law_the_layer_trains_and_evaluates_with_it(name):
    """Parameters made in one mode serve the other: a gate asks for the same ones in both."""
    program, arguments = layer_program(name)
    for (total, _), (gradients, _) in program(*arguments):
        assert total > 0
        assert np.isfinite(total)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        assert np.asarray(gradients["experts"]["wi"]["kernel"]).any()


@pytest.mark.parametrize("name", GATES)
def test_law_products_of_the_gate_are_in_full_precision(name):
    """Forward and backward; those of `_carry` are the experts' and the dispatch's."""
    program, arguments = layer_program(name)
    text = program.lower(*arguments).as_text("hlo", debug_info=True)
    found = [p for p in products(text) if "._carry/" not in p.place]
    assert len(found) >= (0 if name in WITHOUT_ROUTER else 2 * 3)
    assert all(p.full and p.dtype == "f32" for p in found)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("name", GATES)
def test_law_what_padding_holds_does_not_matter(name, garbage):
    """Outputs, losses, metrics and gradients are bit for bit those of any other padding."""
    program, (x_BLM, mask_BL) = layer_program(name)
    assert not mask_BL.all()
    expected = program(x_BLM, mask_BL)
    got = program(np.where(mask_BL[..., None], x_BLM, np.float32(garbage)), mask_BL)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))

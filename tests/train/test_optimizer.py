"""Schedules at points worked out by hand; Adafactor's second moments are each matrix's own."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from optax import contrib

from m4.model.gates.hash import hash
from m4.train.optimizer import Moments, adafactor, adamw, muon, newton_schulz
from m4.train.schedules import rsqrt
from tests.shared import small_layer


def first_updates(optimizer, gradient, params) -> Any:
    """(updates, state) of the first step, as one program."""

    @jax.jit
    def update(gradient, params):
        return optimizer.update(gradient, optimizer.init(params), params)

    return update(gradient, params)


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        # 1 / sqrt(max(step, 10^4)): 0.01 for the first 10^4 steps, 0.005 at 4 * 10^4.
        (rsqrt(1_000_000), {0: 0.01, 9_999: 0.01, 39_999: 0.005}),
        # Step i is the (i + 1)-th: half way up at the 5th of 10; flat to the 16th; sqrt(16 / 64) at
        # the 64th; in the cooldown, step 90 has 10 of 20 left: sqrt(16 / 91) / 2.
        (
            rsqrt(100, peak=1.0, warmup_steps=10, hold_steps=16, cooldown_steps=20),
            {4: 0.5, 9: 1.0, 15: 1.0, 63: 0.5, 90: (16 / 91) ** 0.5 / 2},
        ),
        # A longer warm-up than the hold: the 10th of 20 steps, the last of them, sqrt(20 / 80).
        (rsqrt(100, peak=1.0, warmup_steps=20, hold_steps=5), {9: 0.5, 19: 1.0, 79: 0.5}),
        # Held to the end, however long.
        (rsqrt(580, peak=7e-3, warmup_steps=120, hold_steps=None), {59: 3.5e-3, 10**6: 7e-3}),
    ],
)
def test_schedules_by_hand(schedule, points):
    for step, rate in points.items():
        np.testing.assert_allclose(schedule(jnp.asarray(step)), rate, rtol=1e-6)


def test_statistics_are_rows_and_columns_of_each_expert():
    state: Any = adafactor(10, smallest_factored=4).init(
        {"wi": jnp.ones((300, 8, 16)), "small": jnp.ones((3, 5)), "scale": jnp.ones(7)}
    )
    moments = state[0].moments
    assert isinstance(moments["wi"], Moments)
    assert moments["wi"].rows.shape == (300, 8)
    assert moments["wi"].columns.shape == (300, 16)
    assert moments["scale"].shape == (7,)
    # 3 is below the size that is factored.
    assert moments["small"].shape == (3, 5)


@pytest.mark.parametrize(
    ("shape", "name"),
    # More experts than hidden units, too: they share no statistics.
    [((20, 8, 16), "wi"), ((2, 3, 8, 16), "blocks"), ((2, 16), "layer_blocks"), ((3, 2, 8), "wo")],
)
def test_each_matrix_is_optax_adafactors(shape, name):
    """Four steps of a stack equal optax's of each matrix alone.

    In `layer_blocks` the first axis counts layers, so that its blocks are vectors.
    """
    rng = np.random.default_rng(2)
    start = (rng.normal(size=shape) * 0.1).astype(np.float32)
    gradients = [rng.normal(size=shape, scale=10.0**k).astype(np.float32) for k in (0, -2, 1, 0)]
    theirs = optax.adafactor(0.01, min_dim_size_to_factor=4, weight_decay_rate=None, momentum=None)

    def run(optimizer, params, gradients) -> Any:
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for gradient in gradients:
            updates, state = update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params

    ours = adafactor(10, smallest_factored=4)
    found = run(ours, {name: start}, [{name: g} for g in gradients])[name]
    block = shape[-1:] if name.endswith("_blocks") else shape[-2:]
    for at in np.ndindex(shape[: -len(block)]):
        wanted = run(theirs, start[at], [g[at] for g in gradients])
        np.testing.assert_allclose(found[at], wanted, rtol=1e-5, atol=1e-6)


def test_adamw_does_not_decay_norm_scales():
    # Of a scanned stack of two layers too, whose first axis counts them.
    params = {"scale": jnp.ones(3), "kernel": jnp.ones((2, 2))}
    params = {**params, "encoder_blocks": jax.tree.map(lambda x: jnp.stack([x, x]), params)}
    nothing = jax.tree.map(jnp.zeros_like, params)
    optimizer = adamw(10, schedule=lambda total: lambda step: 0.5, weight_decay=0.1)
    updates = first_updates(optimizer, nothing, params)[0]
    for found in (updates, updates["encoder_blocks"]):
        np.testing.assert_array_equal(found["scale"], 0.0)
        # -rate * decay * parameter = -0.5 * 0.1 * 1
        np.testing.assert_allclose(found["kernel"], -0.05, rtol=1e-6)


def test_adamw_clips_the_global_norm_as_optax_does():
    # Norms 5 and 0.5 of both leaves together, around the limit 2: steps are clipped, not, clipped.
    # Adam does not mind one factor on all gradients; the moments' mixture shows which were clipped.
    params = {"a": jnp.ones(2), "b": jnp.ones((1, 2))}
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[0.0, 4.0]])}
    rate = 0.1
    ours = adamw(10, schedule=lambda total: lambda step: rate, clip_norm=2.0)
    adam = optax.adamw(rate, b2=0.98, eps=1e-9, weight_decay=0.0)
    theirs = optax.chain(optax.clip_by_global_norm(2.0), adam)
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    for scale in (1.0, 0.1, 1.0):
        scaled = jax.tree.map(lambda g, by=scale: g * by, gradients)
        found, states[0] = ours.update(scaled, states[0], params)
        wanted, states[1] = theirs.update(scaled, states[1], params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


def test_adafactors_weight_decay_is_the_rates_part_of_the_weights():
    rng = np.random.default_rng(1)
    params, gradient = ({"w": rng.normal(size=(8, 16)).astype(np.float32)} for _ in range(2))
    decayed, plain = (
        first_updates(adafactor(10, weight_decay=decay), gradient, params)[0]["w"]
        for decay in (0.1, 0.0)
    )
    np.testing.assert_allclose(decayed, plain - 0.01 * 0.1 * params["w"], rtol=1e-5, atol=1e-7)


def test_adafactors_weights_are_replaced_where_they_are():
    """A step of two layers on CPUs copies no donated weights."""
    optimizer = adafactor(10, smallest_factored=4)
    weights = {name: jnp.ones((3, 16, 48)) for name in ("a", "b")}

    def step(weights, state, x):
        def loss(weights):
            h = jnp.einsum("ECM,EMF->ECF", x, weights["a"])
            return jnp.sum(jnp.square(jnp.einsum("ECF,EMF->ECM", jnp.tanh(h), weights["b"])))

        gradients = jax.grad(loss)(weights)
        updates, state = optimizer.update(gradients, state, weights)
        norm = optax.tree.norm(gradients)  # as a metric
        return optax.apply_updates(weights, updates), state, norm

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(
        weights, optimizer.init(weights), jnp.ones((3, 5, 16))
    )
    program = compiled.compile().as_text()
    assert program is not None
    entry = program[program.index("\nENTRY") :]
    written = re.findall(r" = f32\[3,16,48\]\S* (\w+)\(", entry)
    assert written.count("parameter") == 2
    assert "copy" not in written


@pytest.mark.parametrize("shape", [(3, 8, 32), (2, 3, 32, 8), (2, 8, 8)])
def test_newton_schulz_steps_in_gram_form_are_optaxs(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    x[0] *= np.logspace(0, -4, shape[-1])  # columns of very different lengths
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-3)):
        with jax.enable_x64(dtype == np.float64):
            x_of_type = jnp.asarray(x, dtype)
            optaxs = contrib.scale_by_muon(
                beta=0.0,
                nesterov=False,
                weight_dimension_numbers=contrib.MuonDimensionNumbers(-2, -1),
            )
            expected: Any = optaxs.update(x_of_type, optaxs.init(x_of_type))[0]
            np.testing.assert_allclose(newton_schulz(x_of_type), expected, atol=tolerance)


@pytest.mark.parametrize("experts", [True, False])
def test_first_muon_step_is_optax_muons(experts):
    """Equals optax, which takes matrices one by one, for Adam's parameters too."""
    rng = np.random.default_rng(0)
    shapes = {"query": (8, 8), "key": (8, 8), "wi": (8, 24), "wo": (24, 8), "experts": (2, 8, 8)}
    shapes |= {"encoder_blocks": (2, 16, 4), "router": (4, 3), "logits_dense": (4, 9)}
    shapes["noise"] = (4, 3)  # the second matrix of noisy top-k's router
    with_adam = {"router", "noise", "logits_dense", *(() if experts else ("experts",))}
    params: Any = {
        name: {"kernel": rng.normal(size=shape).astype(np.float32)}
        for name, shape in shapes.items()
    }
    params["norm"] = {"scale": np.ones(8, np.float32)}
    params["token_embedder"] = {"embedding": rng.normal(size=(9, 4)).astype(np.float32)}
    gradient = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
    schedule = functools.partial(rsqrt, peak=0.01)
    ours = muon(10, schedule=schedule, matrix_rate=3.0, experts=experts)

    def numbers(params):
        matrix = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return {
            name: {leaf: matrix if leaf == "kernel" and name not in with_adam else None}
            for name, tree in params.items()
            for leaf in tree
        }

    theirs = contrib.muon(
        0.03,
        adam_learning_rate=0.01,
        adam_b2=0.98,
        adam_eps_root=0.0,
        eps=1e-9,
        muon_weight_dimension_numbers=numbers,
    )
    updates, _ = first_updates(ours, gradient, params)
    wanted, _ = first_updates(theirs, gradient, params)
    # Experts take other Newton-Schulz products on CPUs.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), updates, wanted
    )


EXPERTS = {"moe": {"experts": {"wi": {"kernel": (3, 8, 16)}, "wo": {"kernel": (3, 16, 8)}}}}
WITH_EXPERTS = {**EXPERTS, "query": {"kernel": (8, 8)}, "norm": {"scale": (8,)}}
APART = [
    adamw,
    functools.partial(adamw, weight_decay=0.1),
    muon,
    functools.partial(muon, experts=False),
]


def drawn(shapes, seed: int) -> Any:
    """Draws arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def walked(optimizer, gradients, shapes: Any = WITH_EXPERTS) -> list[Any]:
    """Returns the parameters after each step."""
    params = drawn(shapes, 99)
    state, update, seen = optimizer.init(params), jax.jit(optimizer.update), []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


def assert_near(found, wanted, rtol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10), found, wanted
    )


def falling(total, *, by=1):
    """A rate for each step; of every `by`-th step, the last of each."""
    return lambda step: 0.01 * by / (1 + (by * step + by - 1))


@pytest.mark.parametrize("make", APART)
def test_experts_every_fourth_step_are_the_optimizer_on_mean_gradients(make):
    """Two whole rounds and a half equal a plain loop; other parameters are as without it."""
    gradients = [drawn(WITH_EXPERTS, seed) for seed in range(10)]
    # Not tiny: else a sum would do as a mean, since updates do not depend on the gradients' scale.
    make = functools.partial(make, eps=1.0)
    found = walked(make(10, schedule=falling, experts_every=4), gradients)
    plain = walked(make(10, schedule=falling), gradients)
    decays: Any = {"b1": 0.9**4, "b2": 0.98**4, "beta": 0.95**4}
    clipped = [g["moe"] for g in gradients]
    if make.func is adamw:  # it clips by the norm of all parameters first
        norms = [float(optax.tree.norm(g)) for g in gradients]
        assert min(norms) > 1
        clipped = [optax.tree.scale(1 / n, g) for n, g in zip(norms, clipped, strict=True)]
        decays = {"b1": 0.9**4, "b2": 0.98**4, "clip_norm": 1e6}
    means = [jax.tree.map(lambda *g: sum(g) / 4, *clipped[i : i + 4]) for i in (0, 4)]
    slow = make(10, schedule=functools.partial(falling, by=4), **decays)
    rounds = walked(slow, [{"moe": mean} for mean in means], EXPERTS)
    for step, params in enumerate(found):
        stand = [{"moe": drawn(WITH_EXPERTS, 99)["moe"]}, *rounds][(step + 1) // 4]
        assert_near(params, plain[step] | stand)


@pytest.mark.parametrize("make", APART[:3])  # Nesterov's Adam counts updates in its first steps
def test_experts_go_as_far_in_a_step_of_four_as_in_four(make):
    """Along one gradient, at one rate: why the rate is `experts_every` times as high."""
    steady = {"schedule": lambda total: lambda step: 0.01}
    gradients = [drawn(WITH_EXPERTS, 0)] * 8
    found = walked(make(10, **steady, experts_every=4), gradients)
    plain = walked(make(10, **steady), gradients)
    # A weight decays four times by 0.1% of itself, or once by 0.4%.
    assert_near(found[7], plain[7], rtol=2e-3)
    half = walked(make(10, **steady, experts_every=4, experts_rate=2.0), gradients)
    moved, by_half = (
        jax.tree.map(lambda a, b: a - b, params[7]["moe"], drawn(EXPERTS, 99)["moe"])
        for params in (found, half)
    )
    assert_near(jax.tree.map(lambda x: 2 * x, by_half), moved, rtol=2e-3)


def products(jaxpr, in_conditionals: bool) -> int:
    """Counts matrix products, of branches of conditionals that depend on data too or not."""
    count = 0
    for one in jaxpr.eqns:
        count += one.primitive.name == "dot_general"
        if one.primitive.name != "cond" or in_conditionals:
            for inner in jaxprs_in_params(one.params):
                count += products(inner, in_conditionals)
    return count


def test_between_their_steps_experts_cost_no_product_and_no_copy():
    shapes = {"experts": {"wi": {"kernel": (4, 16, 48)}, "wo": {"kernel": (4, 48, 16)}}}
    optimizer = muon(10, experts_every=4)
    weights: Any = drawn(shapes, 0)
    state = optimizer.init(weights)
    traced = jax.make_jaxpr(optimizer.update)(weights, state, weights).jaxpr
    assert products(traced, in_conditionals=True) > 0
    assert products(traced, in_conditionals=False) == 0

    def step(weights, state, x):
        def loss(weights):
            h = jnp.einsum("ECM,EMF->ECF", x, weights["experts"]["wi"]["kernel"])
            out = jnp.einsum("ECF,EFM->ECM", jnp.tanh(h), weights["experts"]["wo"]["kernel"])
            return jnp.sum(jnp.square(out))

        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(weights, state, jnp.ones((4, 5, 16)))
    program = lowered.compile().as_text()
    assert program is not None
    branches = re.findall(r"branch_computations=\{%([\w.]+), ", program)  # the first one waits
    outer = [program[program.index("\nENTRY") :]]
    outer += [re.split(r"\n}", program[program.index(f"\n%{name} (") :])[0] for name in branches]
    assert branches
    for text in outer:
        assert not re.search(r" = f32\[4,(16,48|48,16)\]\S* copy\(", text)


@pytest.mark.parametrize("make", [adafactor, adamw, muon])
def test_a_table_stays_bit_equal(make):
    layer = small_layer(gate=hash, vocab_size=50)
    rng = np.random.default_rng(0)
    x_BLM = rng.normal(size=(2, 8, 6)).astype(np.float32)
    inputs = x_BLM, np.ones((2, 8), bool), rng.integers(0, 50, (2, 8))

    def outputs(params) -> Any:
        return layer.apply({"params": params}, *inputs, deterministic=True)

    init = jax.jit(lambda key: layer.init(key, *inputs, deterministic=True))
    first: Any = jax.device_get(init(jax.random.key(2))["params"])
    optimizer = make(10) if make is muon else make(10, weight_decay=0.1)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda params: jnp.sum(jnp.square(outputs(params))))(params)
        # No gradient reaches a table; were there one, it would not matter.
        noise = jax.tree.map(lambda g: g + 0.5, gradients)
        updates, state = optimizer.update(noise, state, params)
        return optax.apply_updates(params, updates), state

    params, state = first, jax.jit(optimizer.init)(first)
    for _ in range(3):
        params, state = step(params, state)
    table = first["hash"]["table"]
    assert table.shape == (50,)
    np.testing.assert_array_equal(params["hash"]["table"], table)
    for name in ("wi", "wo"):
        moved = params["experts"][name]["kernel"] != first["experts"][name]["kernel"]
        assert moved.all()

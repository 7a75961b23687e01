"""Schedules by hand, each matrix's Adafactor, experts apart, rates by group of parameters."""

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

from m4.model.gates.deepseek import deepseek
from m4.model.gates.hash import hash
from m4.parallel.mesh import to_global
from m4.settings import SettingError
from m4.train.average import averaged, used
from m4.train.optimizer import GROUPS, adafactor, adamw, muon, newton_schulz, rate_of
from m4.train.schedules import rsqrt
from tests.shared import SMALL_MOE, small_layer, small_model
from tests.train.test_step import MODEL, a_batch, mesh_of
from tests.train.trainers import program_of


def first_updates(optimizer, gradient, params) -> Any:
    """Returns (updates, state) of the first step, from one program."""

    @jax.jit
    def update(gradient, params):
        return optimizer.update(gradient, optimizer.init(params), params)

    return update(gradient, params)


def assert_near(found, wanted, rtol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10), found, wanted
    )


def walked(optimizer, params, gradients) -> list[Any]:
    """Returns the parameters after each step."""
    state, update, seen = optimizer.init(params), jax.jit(optimizer.update), []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


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


@pytest.mark.parametrize(
    ("shape", "name"),
    # More experts than hidden units, too: they share no statistics.
    [((20, 8, 16), "wi"), ((2, 3, 8, 16), "blocks"), ((2, 16), "layer_blocks"), ((3, 2, 8), "wo")],
)
# Numbers smaller than 1e-3 learn as if they were so large.
@pytest.mark.parametrize("scale", [0.1, 1e-4])
def test_each_matrix_is_optax_adafactors(shape, name, scale):
    """Four steps of a stack equal optax's of each matrix alone.

    In `layer_blocks` the first axis counts layers, so that its blocks are vectors.
    """
    rng = np.random.default_rng(2)
    start = (rng.normal(size=shape) * scale).astype(np.float32)
    gradients = [rng.normal(size=shape, scale=10.0**k).astype(np.float32) for k in (0, -2, 1, 0)]
    theirs = optax.adafactor(0.01, min_dim_size_to_factor=4, weight_decay_rate=None, momentum=None)
    ours = adafactor(10, smallest_factored=4)
    found = walked(ours, {name: start}, [{name: g} for g in gradients])[-1][name]
    block = shape[-1:] if name.endswith("_blocks") else shape[-2:]
    for at in np.ndindex(shape[: -len(block)]):
        wanted = walked(theirs, start[at], [g[at] for g in gradients])[-1]
        np.testing.assert_allclose(found[at], wanted, rtol=1e-5, atol=1e-5 * scale)


def test_adamw_does_not_decay_norm_scales():
    # Also in a scanned stack of two layers, whose first axis counts them.
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
        assert_near(found, wanted)


def test_adafactors_weight_decay_is_the_rates_part_of_the_weights():
    rng = np.random.default_rng(1)
    params, gradient = ({"w": rng.normal(size=(8, 16)).astype(np.float32)} for _ in range(2))
    decayed, plain = (
        first_updates(adafactor(10, weight_decay=decay), gradient, params)[0]["w"]
        for decay in (0.1, 0.0)
    )
    np.testing.assert_allclose(decayed, plain - 0.01 * 0.1 * params["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(3, 8, 32), (2, 3, 32, 8), (2, 8, 8)])
def test_newton_schulz_steps_in_gram_form_are_optaxs(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    x[0] *= np.logspace(0, -4, shape[-1])  # columns of very different lengths
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-3)):
        with jax.enable_x64(dtype == np.float64):
            x_of_type = jnp.asarray(x, dtype)
            numbers = contrib.MuonDimensionNumbers(-2, -1)
            optaxs = contrib.scale_by_muon(
                beta=0.0, nesterov=False, weight_dimension_numbers=numbers
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
        0.03, adam_learning_rate=0.01, adam_b2=0.98, adam_eps_root=0.0, eps=1e-9,
        muon_weight_dimension_numbers=numbers,
    )  # fmt: skip
    updates, _ = first_updates(ours, gradient, params)
    wanted, _ = first_updates(theirs, gradient, params)
    # Experts take other Newton-Schulz products on CPUs.
    assert_near(updates, wanted, rtol=1e-3)


EXPERTS = {"moe": {"experts": {"wi": {"kernel": (3, 8, 16)}, "wo": {"kernel": (3, 16, 8)}}}}
WITH_EXPERTS = {**EXPERTS, "query": {"kernel": (8, 8)}, "norm": {"scale": (8,)}}
APART = [
    adamw, functools.partial(adamw, weight_decay=0.1), muon,
    functools.partial(muon, experts=False),
]  # fmt: skip


def drawn(shapes, seed: int) -> Any:
    """Draws arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def falling(total, *, by=1):
    """Returns a falling rate for each step or, for rounds of `by` steps, `by` times their last."""
    return lambda step: 0.01 * by / (1 + (by * step + by - 1))


@pytest.mark.parametrize("make", APART)
def test_experts_every_fourth_step_are_the_optimizer_on_mean_gradients(make):
    """Two whole rounds and a half equal a plain loop; other parameters are as without it."""
    gradients = [drawn(WITH_EXPERTS, seed) for seed in range(10)]
    # Not tiny: else a sum would do as a mean, since updates do not depend on the gradients' scale.
    make = functools.partial(make, eps=1.0)
    start = drawn(WITH_EXPERTS, 99)
    found = walked(make(10, schedule=falling, experts_every=4), start, gradients)
    plain = walked(make(10, schedule=falling), start, gradients)
    decays: Any = {"b1": 0.9**4, "b2": 0.98**4, "beta": 0.95**4}
    clipped = [g["moe"] for g in gradients]
    if make.func is adamw:  # it clips by the norm of all parameters first
        norms = [float(optax.tree.norm(g)) for g in gradients]
        assert min(norms) > 1
        clipped = [optax.tree.scale(1 / n, g) for n, g in zip(norms, clipped, strict=True)]
        decays = {"b1": 0.9**4, "b2": 0.98**4, "clip_norm": 1e6}
    means = [jax.tree.map(lambda *g: sum(g) / 4, *clipped[i : i + 4]) for i in (0, 4)]
    slow = make(10, schedule=functools.partial(falling, by=4), **decays)
    experts = {"moe": start["moe"]}
    rounds = walked(slow, experts, [{"moe": mean} for mean in means])
    for step, params in enumerate(found):
        stand = [experts, *rounds][(step + 1) // 4]
        assert_near(params, plain[step] | stand)


def products(jaxpr, in_conditionals: bool) -> int:
    """Counts matrix products, with or without those in conditional branches."""
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


SGD = optax.sgd(1.0)


def steps(model=MODEL, optimizer: Any = SGD, count=1, **settings):
    """Returns the state before and after steps on one device, by path, and the last metrics."""
    mesh = mesh_of(1, 1)
    program = program_of(model, mesh, optimizer, **settings)
    with program.axis_rules():
        state = program.new_state()
        before, metrics = jax.device_get(state.params), {}
        for _ in range(count):
            state, metrics = program.jit()(state, to_global(mesh, a_batch()))
    flat = [jax.tree_util.tree_flatten_with_path(jax.device_get(x))[0]
            for x in (before, state.params, used(state))]  # fmt: skip
    by_path = [{jax.tree_util.keystr(path): leaf for path, leaf in one} for one in flat]
    return *by_path, metrics, [path for path, _ in flat[0]]


@pytest.fixture(scope="module")
def plain():
    return steps()


def test_each_parameter_is_of_one_group(plain):
    """A group's own rate counts before its stack's; together the groups are the whole model."""
    paths = plain[-1]
    alone = {group: {jax.tree_util.keystr(p) for p in paths if not rate_of(p, {group: 0.0})}
             for group in GROUPS}  # fmt: skip
    assert alone["embeddings"] | alone["encoder"] | alone["decoder"] == {*plain[0]}
    assert sum(len(alone[name]) for name in ("embeddings", "encoder", "decoder")) == len(paths)
    # An untied matrix of the logits is one of the embeddings.
    logits = [jax.tree_util.DictKey(name) for name in ("logits_dense", "kernel")]
    assert rate_of(logits, {"embeddings": 0.0, "decoder": 0.5}) == 0.0
    assert alone["experts"] == {p for p in plain[0] if "experts" in p or "shared" in p}
    assert alone["router"] == {p for p in plain[0] if "router" in p}
    for path in paths:
        name = jax.tree_util.keystr(path)
        rate = rate_of(path, {"encoder": 0.0, "experts": 0.5})
        expected = 0.5 if name in alone["experts"] else float(name not in alone["encoder"])
        assert rate == expected, name


@pytest.mark.parametrize("learning_rates", [None, {"high": 2.0, "medium": 2.0, "low": 2.0}])
def test_updates_are_multiplied(plain, learning_rates):
    """By the rates of directions, too; averages see it: after one step they are the parameters."""
    rates = {"encoder": 0.25, "experts": 0.5, "embeddings": 0.0}
    optimizer = averaged(10, optimizer=lambda _: SGD)
    found = steps(optimizer=optimizer, parameter_rates=rates, learning_rates=learning_rates)
    before, after, average, _, paths = found
    for path in paths:
        name = jax.tree_util.keystr(path)
        factor = rate_of(path, rates) * (2.0 if learning_rates else 1.0)
        expected = factor * (plain[1][name] - plain[0][name])
        np.testing.assert_allclose(after[name] - before[name], expected, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(average[name], after[name], atol=1e-6)


@pytest.mark.parametrize("make", [adafactor, functools.partial(adamw, weight_decay=0.1), muon])
def test_frozen_parameters_stay_bit_equal(plain, make):
    """Weight decay, which needs no gradient, leaves them alone; all others move."""
    rates = {"encoder": 0.0, "router": 0.0}
    before, after, _, metrics, paths = steps(optimizer=make(10), count=2, parameter_rates=rates)
    frozen = {jax.tree_util.keystr(path): not rate_of(path, rates) for path in paths}
    for name in before:
        assert np.array_equal(before[name], after[name]) == frozen[name], name
    assert metrics["gradient_norm"] > 0


def test_frozen_parameters_have_no_gradient(plain):
    *_, metrics, _ = steps(parameter_rates={"decoder": 0.0, "encoder": 0.0})
    embeddings = [name for name in plain[0] if "embed" in name.split("]")[0]]
    moved = [plain[1][name] - plain[0][name] for name in embeddings]  # by SGD: the gradient
    norm = float(optax.tree.norm(moved))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_frozen_router_keeps_its_biases(rate):
    """They move by no gradient, but by the experts' loads."""
    moe = functools.partial(SMALL_MOE, gate=functools.partial(deepseek, bias_rate=0.1))
    before, after, *_ = steps(small_model(moe=moe), parameter_rates={"router": rate})
    biases = [name for name in before if name.endswith("['table']")]
    assert biases
    for name in biases:
        assert np.array_equal(before[name], after[name]) == (rate == 0.0), name


def test_rates_of_0_for_all_are_refused():
    said = "^Training.parameter_rates = .*: must be above 0 .* no parameter would be trained"
    with pytest.raises(SettingError, match=said):
        steps(parameter_rates={"embeddings": 0, "encoder": 0, "decoder": 0})

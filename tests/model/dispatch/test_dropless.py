"""Dropless dispatch: rows without neighbours, the exchange over a mesh, products of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.dispatch import grouped_matmul as module
from m4.model.dispatch.dropless import ROUNDS, dropless
from m4.model.dispatch.grouped_matmul import grouped_matmul
from m4.model.feed_forward import Experts
from tests.model.dispatch.shared import (
    SETTINGS,
    Setting,
    assert_close,
    assert_right,
    everyone_to,
    numbers,
    on,
    plan,
    random_plan,
)

ONLY = {"dropless": dropless}


@pytest.mark.parametrize(("experts", "expert", "choices"), [(4, 3, 2), (1, 0, 1)])
def test_one_expert_takes_all(experts, expert, choices):
    setting = Setting(None, 2, 8, experts, 8, choices)
    assert_right(setting, everyone_to(expert, setting), 0, ONLY)


@pytest.mark.parametrize(
    ("tokens", "mesh"), [(16, None), (256, None), (64, {"data": 2, "expert": 4})]
)
def test_a_row_does_not_know_its_neighbours(tokens, mesh):
    # Token 0 has the same experts in every plan; who else is there, and where, changes.
    M, F, E, K = 64, 96, 8, 2
    groups = 8 if mesh else 1
    rng = np.random.default_rng(0)
    experts = Experts(
        (jnp.asarray(rng.normal(size=(E, M, F)), jnp.float32),),
        jnp.asarray(rng.normal(size=(E, F, M)), jnp.float32),
    )
    run = jax.jit(dropless)
    x_M = rng.normal(size=M).astype(np.float32)
    found = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x_GSM = rng.normal(size=(groups, tokens, M)).astype(np.float32)
        expert_GSK = np.argsort(rng.random((groups, tokens, E)), axis=-1)[..., :K].astype(np.int32)
        place = int(rng.integers(tokens))
        x_GSM[0, place], expert_GSK[0, place] = x_M, (2, 5)
        weight_GSK = rng.random((groups, tokens, K)).astype(np.float32)
        weight_GSK[0, place] = (0.75, 0.25)
        slot_GSK = np.broadcast_to(np.arange(tokens)[None, :, None], expert_GSK.shape)
        routing = plan(expert_GSK, slot_GSK, weight_GSK, E, tokens)
        with on(mesh):
            found.add(np.asarray(run(x_GSM, routing, experts))[0, place].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("devices", [2, 4])
def test_rows_travel_over_fewer_devices(devices):
    mesh = {"expert": devices, "devices": jax.devices()[:devices]}
    setting = Setting(mesh, 4, 8, 4, 8, 2)
    assert_right(setting, random_plan(0, *setting[1:]), 0, ONLY)
    assert_right(setting, everyone_to(3, setting), 0, ONLY)


def test_as_many_rounds_as_there_are_rows(monkeypatch):
    # A device may send one row a round to another; one expert takes all, so that 8 are needed.
    monkeypatch.setattr("m4.model.dispatch.dropless._FEWEST_A_ROUND", 1)
    monkeypatch.setattr("m4.model.dispatch.dropless._SPARE", 0)
    setting = SETTINGS["data 2 x expert 4"]._replace(K=2)
    for routing in (everyone_to(3, setting), random_plan(1, *setting[1:])):
        assert_right(setting, routing, 0, ONLY)
    x_GSM, _, experts = numbers(0, setting)
    with on(setting.mesh):
        text = jax.jit(dropless).lower(x_GSM, routing, experts).compile().as_text() or ""
    assert f'{ROUNDS}/while"' in text  # plans know the loop by its name


def test_counts_then_rows_in_bfloat16_and_no_weights():
    setting = Setting({"data": 2, "expert": 4}, 8, 256, 4, 256, 2)
    x_GSM, _, experts = numbers(0, setting)
    experts = jax.tree.map(lambda x: x.astype(jnp.bfloat16), experts)
    routing = everyone_to(1, setting)
    with on(setting.mesh):
        lowered = jax.jit(dropless).lower(x_GSM.astype(jnp.bfloat16), routing, experts)
        text = lowered.as_text()
        compiled = lowered.compile().as_text() or ""
    types = [
        line.rsplit("-> ", 1)[1] for line in text.splitlines() if '"stablehlo.all_to_all"' in line
    ]
    # Where rows begin, and counts by expert and group; then rows there and back: 4 owners, 256 of
    # the device's 512 rows to each at most in a round.
    assert sorted(types) == sorted(
        ["tensor<4x2xi32>", "tensor<1024x6xbf16>", "tensor<1024x6xbf16>"]
    )
    assert "all-gather" not in compiled


# --- The products -----------------------------------------------------------------


def test_blocks_that_are_not_there_are_not_multiplied():
    # Were they multiplied, the NaN of their rows would be seen.
    x_NbM = jnp.full((4, 2, 3), jnp.nan).at[:2].set(1.0)
    w_EMF = jnp.ones((2, 3, 5))
    y_NbF = jax.jit(grouped_matmul)(x_NbM, w_EMF, jnp.array([0, 1, 2, 2]), jnp.array(2))
    # 1 * 1 three times.
    assert np.asarray(y_NbF)[:2].tolist() == [[[3.0] * 5] * 2] * 2
    assert not np.asarray(y_NbF)[2:].any()


def arguments(b: int, M: int, F: int):
    """Returns (x_NbM, w_EMF, expert_N, count) and d_NbF for five blocks, of which three exist."""
    rng = np.random.default_rng(0)
    shapes = ((5, b, M), (3, M, F), (5, b, F))
    x_NbM, w_EMF, d_NbF = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return (x_NbM, w_EMF, jnp.array([0, 2, 2, 3, 3]), jnp.array(3)), d_NbF


def interpreted(x_NbM, w_EMF, expert_N, count):
    return module._megablox(x_NbM, w_EMF, expert_N, interpret=True)


def interpreted_backward(x_NbM, w_EMF, expert_N, count, d_NbF):
    return module._megablox_backward(x_NbM, w_EMF, expert_N, d_NbF, interpret=True)


@pytest.mark.parametrize(
    ("product", "backward", "sizes"),
    [
        # lax.ragged_dot runs on a CPU too, so what other platforms compute is compared here.
        (module._grouped, module._grouped_backward, (4, 6, 7)),
        (module._on_gpu, module._on_gpu_backward, (4, 6, 7)),
        # 384 has tiles of 384 and, where 256 divides nothing, of 128.
        (interpreted, interpreted_backward, (8, 256, 384)),
    ],
)
def test_the_products_of_accelerators_are_those_of_cpus(product, backward, sizes):
    given, d_NbF = arguments(*sizes)
    assert_close(product(*given), module._loop(*given), "product")
    wanted = module._loop_backward(*given, d_NbF)
    assert_close(backward(*given, d_NbF), wanted, "gradient")


@pytest.mark.parametrize(
    # Eleven blocks are processed as 4 + 4 + 2 + 1, three as 2 + 1. The first expert has none, and
    # the second one of the last expert's two is missing.
    "sizes_E",
    [(0, 11, 3, 1, 0, 2), (17, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0,) * 6],
)
def test_gradients_of_several_blocks_at_once(sizes_E):
    rng = np.random.default_rng(1)
    expert_N = np.append(np.repeat(np.arange(6), sizes_E), [6, 6])
    count = max(sum(sizes_E) - (sizes_E[-1] == 2), 0)
    N = len(expert_N)
    x_NbM, w_EMF, d_NbF = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((N, 3, 4), (6, 4, 5), (N, 3, 5))
    )

    def by_choice(x_NbM, w_EMF):
        # A block that is not there is cut off: jnp.take's fill is 0.
        w_NMF = jnp.take(
            w_EMF, jnp.where(jnp.arange(N) < count, expert_N, 6), axis=0, mode="fill", fill_value=0
        )
        return jnp.einsum("nbm,nmf->nbf", x_NbM, w_NMF)

    y_NbF, gradients = jax.vjp(by_choice, x_NbM, w_EMF)
    given = (x_NbM, w_EMF, jnp.asarray(expert_N), jnp.array(count))
    assert_close(jax.jit(module._loop)(*given), y_NbF, "product")
    found = jax.jit(module._loop_backward)(*given, d_NbF)
    assert_close(found, gradients(d_NbF), "gradient")

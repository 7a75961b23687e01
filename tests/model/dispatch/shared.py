"""Every implementation of dispatch, plans, the dense reference and settings for tests."""

import contextlib
import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from m4.model import dispatch
from m4.model.feed_forward import Experts
from m4.model.product import product as plain_product
from m4.model.routing import Routing
from m4.parallel.mesh import axis_rules_context, make_mesh
from tests.model.test_gates import tokens_of
from tests.shared import parts_in

IMPLEMENTATIONS = parts_in(dispatch)
M, F = 6, 4


class Setting(NamedTuple):
    """Mesh (None for one device) and plans' shapes, for one program per implementation."""

    mesh: dict[str, int] | None
    G: int
    S: int
    E: int
    C: int
    K: int


SETTINGS = {
    # One device; more slots than choices, and more choices (K*S = 32) than slots (E*C = 12).
    "one, more slots": Setting(None, 2, 4, 4, 4, 2),
    "one, more choices": Setting(None, 3, 8, 4, 3, 4),
    # Eight. The first holds any gate's plan: C = S, K = E.
    "data 2 x expert 4": Setting({"data": 2, "expert": 4}, 8, 8, 4, 8, 4),
    "data 2 x node 2 x expert 2": Setting({"data": 2, "node": 2, "expert": 2}, 8, 8, 4, 3, 4),
    "node 2 x expert 4": Setting({"data": 1, "node": 2, "expert": 4}, 16, 4, 8, 4, 2),
    "expert 8": Setting({"data": 1, "expert": 8}, 8, 8, 8, 2, 8),
    "expert 4 x model 2": Setting({"data": 1, "expert": 4, "model": 2}, 8, 8, 4, 4, 2),
}


def on(sizes: Mapping[str, Any] | None):
    """Returns the context of a mesh, or an empty one without sizes."""
    return contextlib.nullcontext() if sizes is None else axis_rules_context(make_mesh(**sizes))


def random_plan(seed: int, G: int, S: int, E: int, C: int, K: int) -> Routing:
    """Returns any partial assignment of choices to slots, also ones that no gate would plan."""
    rng = np.random.default_rng(seed)
    expert = np.zeros((G, S, K), np.int32)
    slot = np.full((G, S, K), -1, np.int32)
    for g in range(G):
        slots = [(e, c) for e in range(E) for c in range(C)]
        rng.shuffle(slots)
        for s in range(S):
            chosen = rng.permutation(E)[:K]
            for k, e in enumerate(chosen):
                expert[g, s, k] = e
                free = [slot for slot in slots if slot[0] == e]
                if free and rng.random() < 0.8:  # else: dropped, or padding
                    slots.remove(free[0])
                    slot[g, s, k] = free[0][1]
    weight = rng.random((G, S, K)).astype(np.float32) * (slot >= 0)
    return plan(expert, slot, weight, E, C)


def everyone_to(expert: int, setting: Setting) -> Routing:
    """Returns a plan in which each token's only slot is at one expert."""
    _, G, S, E, C, K = setting
    slot = np.full((G, S, K), -1)
    slot[..., 0] = np.arange(S)[None]
    return plan(np.full((G, S, K), expert), slot, np.ones((G, S, K), np.float32), E, C)


def plan(expert_GSK, position_GSK, weight_GSK, E: int, C: int) -> Routing:
    """Returns a plan without losses and metrics."""
    zero: Any = np.zeros((), np.float32)
    return Routing(expert_GSK, position_GSK, weight_GSK, zero, zero, {}, E, C)


def planned(gate, setting: Setting, seed: int, capacity: int, real: float, mode) -> Routing | None:
    """Returns a gate's plan in the shapes of a setting, or None if the shapes do not hold it.

    A gate may use fewer slots than the setting's C and fewer choices than its K: empty slots and
    choices without a slot change nothing. capacity: slots that it is offered (BASE and expert
    choice count their own). `real`: share of tokens that are no padding.
    mode: (train, with a key).
    """
    _, G, S, E, C, K = setting
    mask = np.random.default_rng(seed).random((G, S)) < real
    tokens = tokens_of(seed, train=mode[0], key=mode[1], mask=mask, shape=(G, S, E))
    routing = gate(tokens, E, lambda choices: capacity)
    arrays = jax.device_get((routing.expert_GSK, routing.position_GSK, routing.weight_GSK))
    missing = K - routing.expert_GSK.shape[-1]
    if missing < 0 or routing.capacity > C:
        return None
    expert_GSK, position_GSK, weight_GSK = (
        np.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=value)
        for x, value in zip(arrays, (0, -1, 0), strict=True)
    )
    return plan(expert_GSK, position_GSK, weight_GSK, E, C)


@struct.dataclass
class OffsetExperts(Experts):
    """Experts with an offset, so that an empty slot would not give 0."""

    def __call__(self, x, *, product=plain_product, spread=lambda keep_EG1F: keep_EG1F):
        h = jnp.tanh(product(x, self.inward[0]) + 0.3)
        if self.keep_EG1F is not None:
            h = h * spread(self.keep_EG1F)
        return product(h, self.outward)


def dense(x_GSM, routing, experts: Experts):
    """Applies every expert to every token, and sums over the choices with a slot, weighted."""
    assert experts.keep_EG1F is not None
    h_EGSF = jnp.tanh(jnp.einsum("GSM,EMF->EGSF", x_GSM, experts.inward[0]) + 0.3)
    y_EGSM = jnp.einsum("EGSF,EFM->EGSM", h_EGSF * experts.keep_EG1F, experts.outward)
    weight_GSK = routing.weight_GSK * (routing.position_GSK >= 0)
    chosen_GSKE = jax.nn.one_hot(routing.expert_GSK, routing.num_experts)
    return jnp.einsum("GSK,GSKE,EGSM->GSM", weight_GSK, chosen_GSKE, y_EGSM)


def numbers(seed: int, setting: Setting):
    """Returns x_GSM, the gradient's direction [G, S, M], and experts with dropout's factors."""
    rng = np.random.default_rng(seed)

    def draw(*size: int) -> Any:
        return rng.normal(size=size).astype(np.float32)

    G, S, E = setting.G, setting.S, setting.E
    keep_EG1F: Any = (2.0 * rng.integers(0, 2, (E, G, 1, F))).astype(np.float32)
    experts = OffsetExperts((draw(E, M, F),), draw(E, F, M), keep_EG1F)
    return draw(G, S, M), draw(G, S, M), experts


@functools.partial(jax.jit, static_argnames="run")
def value_and_gradients(run, x_GSM, routing, experts, direction_GSM):
    """Returns ((sum, y_GSM), gradients by x, weights and experts)."""

    def total(x_GSM, weight_GSK, experts):
        y_GSM = run(x_GSM, routing.replace(weight_GSK=weight_GSK), experts)
        return jnp.vdot(y_GSM, direction_GSM), y_GSM

    return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(
        x_GSM, routing.weight_GSK, experts
    )


def assert_right(
    setting: Setting, routing: Routing, seed: int, implementations=IMPLEMENTATIONS
) -> None:
    """Asserts that all implementations give the dense reference's outputs and gradients."""
    x_GSM, direction_GSM, experts = numbers(seed, setting)
    (_, expected), expected_gradients = value_and_gradients(
        dense, x_GSM, routing, experts, direction_GSM
    )
    assigned = np.asarray(routing.position_GSK) >= 0
    with on(setting.mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ragged: on CPUs", UserWarning)
        for name, run in implementations.items():
            (_, y_GSM), gradients = jax.device_get(
                value_and_gradients(run, x_GSM, routing, experts, direction_GSM)
            )
            assert_close(y_GSM, expected, f"{name}: y")
            # The weight of a choice without a slot is 0 by contract, and its gradient open.
            assert_close(gradients[0], expected_gradients[0], f"{name}: x")
            assert_close(
                gradients[1] * assigned, expected_gradients[1] * assigned, f"{name}: weight"
            )
            assert_close(gradients[2], expected_gradients[2], f"{name}: experts")
            # A token without a slot gets exactly 0: the residual connection carries it.
            assert not np.asarray(y_GSM)[~assigned.any(axis=-1)].any(), name


def assert_close(a, b, name: str) -> None:
    """Compares arrays, or trees of them."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # Relative to the largest, as a small entry is the difference of large ones.
        largest = max(1.0, float(np.abs(np.asarray(other)).max(initial=0)))
        np.testing.assert_allclose(one, other, atol=1e-5 * largest, rtol=1e-5, err_msg=name)

"""PCGrad and Gradient Vaccine equal a slow reference, also in steps and with rates by direction.

Sums of sets are those of single passes, on any mesh and in parts; without a method nothing changes.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

from m4.model.gates.switch import switch
from m4.parallel.mesh import to_global
from m4.settings import SettingError
from m4.train.average import averaged
from m4.train.multitask.groups import by_language, by_side
from m4.train.multitask.surgery import GradientVaccine, PCGrad, gram, order_of, weighted
from m4.train.program import train_program
from tests.shared import SMALL_MOE
from tests.train.test_step import SHALLOW, a_batch, mesh_of
from tests.train.trainers import training_of

KEY = jax.random.key(7, impl="threefry2x32")
Vectors = list[np.ndarray]
Orders = Callable[[int], list[int]]  # i -> the order in which it looks at the others


def pcgrad(gradients: Vectors, order: Orders) -> np.ndarray:
    """Returns the gradients after Algorithm 1 of PCGrad (arXiv 2001.06782)."""
    altered = [g.copy() for g in gradients]
    for i in range(len(gradients)):
        for j in order(i):
            if j == i or not gradients[j].any():
                continue
            dot = altered[i] @ gradients[j]
            if dot < 0:
                altered[i] = altered[i] - dot / (gradients[j] @ gradients[j]) * gradients[j]
    return np.sum(altered, axis=0)


def vaccine(
    gradients: Vectors, order: Orders, targets: np.ndarray, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns gradients of a part and new targets: Algorithm 1 of Vaccine (arXiv 2010.05874)."""
    altered, targets = [g.copy() for g in gradients], targets.copy()
    for i in range(len(gradients)):
        for j in order(i):
            if j == i or not gradients[j].any() or not gradients[i].any():
                continue
            own, other = np.linalg.norm(altered[i]), np.linalg.norm(gradients[j])
            phi, t = altered[i] @ gradients[j] / (own * other), targets[i, j]
            if phi < t:
                turn = own * (t * np.sqrt(1 - phi**2) - phi * np.sqrt(1 - t**2))
                altered[i] = altered[i] + turn / (other * np.sqrt(1 - t**2)) * gradients[j]
            targets[i, j] = (1 - beta) * t + beta * phi
    return np.sum(altered, axis=0), targets


def altered(surgery, gradients, state=None, key=KEY):
    """Returns the gradient of a step whose parameters are a vector, and the new state."""
    stacked = {"kernel": np.stack(gradients).astype(np.float32)}
    begun = surgery.initial_state(len(gradients)) if state is None else state
    products = gram(stacked, "model")[0]
    weights, begun = jax.jit(surgery.weights)(products, begun, key)
    return weighted(stacked, weights[None], "model")["kernel"].sum(axis=0), begun


def order(i, groups, key=KEY):
    return [int(j) for j in order_of(key, i, groups)]


def test_pcgrad_by_hand():
    # (1, 0) . (-1, 1) = -1 < 0. The first loses -1 / 2 of the second: (1/2, 1/2); the second loses
    # -1 / 1 of the first: (0, 1). Their sum: (1/2, 3/2); of the gradients as they are: (0, 1).
    found, _ = altered(PCGrad(), [[1.0, 0.0], [-1.0, 1.0]])
    np.testing.assert_allclose(found, [0.5, 1.5], rtol=1e-6)


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_they_equal_the_reference(groups):
    random = np.random.default_rng(groups)
    targets = random.uniform(-0.3, 0.5, (groups, groups))
    for turn in range(5):
        # A common part against each other's, so that many cosines are negative; first none are.
        gradients = list(random.normal(size=(groups, 12)))
        gradients[-1] -= 1.5 * gradients[0]
        if turn == 0:
            gradients = [np.abs(g) for g in gradients]
        if turn == 1:  # a group without tokens
            gradients[-1][:] = 0
        found, _ = altered(PCGrad(), gradients)
        wanted = pcgrad(gradients, lambda i: order(i, groups))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)

        surgery = GradientVaccine(beta=0.2)
        found, new = altered(surgery, gradients, targets.astype(np.float32))
        wanted, targets = vaccine(gradients, lambda i: order(i, groups), targets, 0.2)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            new - np.diag(np.diag(new)), targets - np.diag(np.diag(targets)), atol=1e-5
        )


def test_the_order_is_random_and_depends_on_the_key_alone():
    orders = {tuple(order(i, 4, jax.random.fold_in(KEY, n))) for n in range(9) for i in range(4)}
    assert len(orders) > 10
    assert order(1, 4) == order(1, 4)


def test_parts_of_a_scanned_stack_are_its_layers():
    # Two layers in one array: by layer each has separate inner products, in all their sum.
    stacked = {
        "encoder_blocks": {
            "layer_0": {"kernel": np.arange(24.0, dtype=np.float32).reshape(2, 2, 6)}
        },
        "embedding": np.ones((2, 3), np.float32),
    }
    kernel = stacked["encoder_blocks"]["layer_0"]["kernel"]
    by_layer = gram(stacked, "layer")
    np.testing.assert_allclose(by_layer[0], np.full((2, 2), 3.0))  # "embedding" comes first
    for layer in (0, 1):
        np.testing.assert_allclose(by_layer[1 + layer], kernel[:, layer] @ kernel[:, layer].T)
    np.testing.assert_allclose(gram(stacked, "model")[0], by_layer.sum(axis=0))
    weights = np.array([[1, 0], [1, 1], [0, 2]], np.float32)
    found = weighted(stacked, jax.numpy.asarray(weights), "layer")
    found_kernel = found["encoder_blocks"]["layer_0"]["kernel"].sum(axis=0)
    np.testing.assert_allclose(found_kernel[0], kernel[0, 0] + kernel[1, 0])
    np.testing.assert_allclose(found_kernel[1], 2 * kernel[1, 1])


NAMES = ["en-gl", "gl-en", "en-de", "de-en"]
# A row is a group of tokens and nothing is drawn at random: the same on every mesh.
GATE = functools.partial(switch, jitter=0.0)
MODEL = SHALLOW.clone(moe=functools.partial(SMALL_MOE, gate=GATE), directions=4)
GRADIENT = optax.sgd(1.0)  # the new weights are the old ones less the gradients


def mixed(rows: int = 8) -> dict[str, np.ndarray]:
    """Returns a batch with all four directions in every row, in different shares."""
    batch = a_batch(rows)
    random = np.random.default_rng(1)
    ids = np.sort(random.integers(0, 4, (rows, 8), dtype=np.int32) ** 2 // 3, axis=1)
    return {**batch, "direction_ids": ids, "encoder_direction_ids": ids.copy()}


class Without:
    """A method that leaves gradients as they are."""

    granularity = "model"

    def __init__(self, groups):
        self.groups = groups

    def initial_state(self, groups):
        return None

    def weights(self, gram_GG, state, key):
        return jax.numpy.ones(len(gram_GG)), state


def step_of(mesh, model=MODEL, optimizer: Any = GRADIENT, batch=None, steps=1, **settings):
    """Returns the weights before and after a step, and its metrics."""
    training = training_of(lambda total: optimizer, **settings)
    program = train_program(training, model, NAMES, mesh)
    with program.axis_rules():
        state, found, step = program.new_state(), {}, program.jit()
        before = jax.device_get(state.params)
        for _ in range(steps):
            state, found = step(state, to_global(mesh, batch or mixed()))
        return before, jax.device_get(state.params), jax.device_get(found)


def assert_close(a, b, **how):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **how), a, b)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_the_sum_of_the_groups_gradients_is_the_gradient(parts):
    one = mesh_of(1, 1)
    how = {"grad_accum_steps": parts, "aux_loss_factor": 0.5, "router_z_loss_factor": 0.1}
    _, plain, metrics = step_of(one, **how)
    _, grouped, its = step_of(one, gradients=Without(by_language), **how)
    assert_close(grouped, plain, atol=1e-6)
    assert its["loss"] == pytest.approx(metrics["loss"], rel=1e-6)


def lowered(**settings):
    training = training_of(lambda total: GRADIENT, **settings)
    program = train_program(training, SHALLOW, NAMES, mesh_of(1, 1))
    with program.axis_rules():
        state = program.abstract_state()
        return program.jit().lower(state, mixed()).as_text()


def test_settings_that_change_nothing_leave_the_program_as_it_is():
    assert lowered(learning_rates={"gl": 1.0}) == lowered()
    assert lowered(learning_rates={"gl": 2.0}) != lowered()


SURGERIES = [PCGrad(by_language), GradientVaccine(by_side, beta=0.3)]


@pytest.mark.parametrize("surgery", SURGERIES, ids=["pcgrad", "vaccine"])
@pytest.mark.parametrize(("layout", "parts"), [((2, 2, 1, 2), 1), ((2, 4, 1, 1), 2)])
@pytest.mark.thorough
def test_eight_devices_equal_one(surgery, layout, parts):
    how = {"gradients": surgery, "steps": 2, "learning_rates": {"en-gl": 3.0}}
    how |= {"grad_accum_steps": parts, "batch": mixed(16)}
    _, one, metrics = step_of(mesh_of(1, 1), **how)
    _, eight, its = step_of(mesh_of(*layout), **how)
    assert_close(eight, one, atol=1e-5)
    assert its["conflicts"] == pytest.approx(metrics["conflicts"])


def moves(model, optimizer: Any, batch, rates: dict[str, float]) -> list[Any]:
    """Returns what a step adds to the weights without rates of directions, and with these."""
    found = []
    for given in (None, rates):
        before, after, _ = step_of(mesh_of(1, 1), model, optimizer, batch, learning_rates=given)
        found.append(jax.tree.map(np.subtract, after, before))
    return found


@pytest.mark.thorough
def test_a_batch_of_one_direction_moves_at_its_rate():
    # Whatever the optimizer is: Adam's first step has the length of the rate, not of the gradient.
    batch = mixed()
    batch["direction_ids"][:] = 0
    for optimizer in (GRADIENT, optax.adam(0.1), averaged(5, optimizer=lambda _: optax.adam(0.1))):
        plain, rated = moves(SHALLOW.clone(moe=None), optimizer, batch, {"en-gl": 2.0, "de": 5.0})
        assert_close(rated, jax.tree.map(lambda x: 2 * x, plain), atol=1e-6)


@pytest.mark.thorough
def test_a_row_that_one_direction_alone_uses_has_its_rate():
    # Piece 31 is a source of en-gl only; piece 30 of all.
    batch = mixed()
    batch["encoder_input_tokens"] = np.where(batch["direction_ids"] == 0, 31, 30).astype(np.int32)
    batch["decoder_input_tokens"] = batch["decoder_input_tokens"] % 29
    batch["decoder_segment_ids"] = batch["encoder_segment_ids"] = batch["direction_ids"] + 1
    model = SHALLOW.clone(moe=None, source_vocab_size=32)
    found = moves(model, optax.adam(0.1), batch, {"en-gl": 2.0})
    plain, rated = (moved["source_token_embedder"]["embedding"] for moved in found)
    np.testing.assert_allclose(rated[31], 2 * plain[31], rtol=1e-4)
    ratio = rated[30] / plain[30]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    assert 1.0 <= ratio[0] < 2.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_weights": {"en-xx": 2.0}}, "Training.loss_weights = 'en-xx'"),
        ({"learning_rates": {"fr": 2.0}}, "Training.learning_rates = 'fr'"),
        ({"gradients": PCGrad(lambda directions: {"one": [*directions.names]})}, "PCGrad.groups"),
        ({"gradients": PCGrad(lambda directions: {"one": ["en-gl"]})}, "'gl-en'|gl-en is in one"),
        ({"gradients": PCGrad}, "with brackets"),
        ({"loss_weights": lambda sizes: {"en-gl": 1.0}}, "gl-en a number too"),
    ],
)
def test_wrong_names_are_one_line(settings, words):
    with pytest.raises(SettingError, match=words) as raised:
        train_program(training_of(**settings), MODEL, NAMES, mesh_of(1, 1))
    assert "\n" not in str(raised.value)


@pytest.mark.thorough
def test_the_groups_gradients_are_sharded_as_their_parameters():
    # Two groups; of a weight of 8 x 2,048 two devices have 1,024 columns or rows each.
    model = SHALLOW.clone(moe=None, mlp_width=2048)
    training = training_of(gradients=PCGrad(by_language))
    program = train_program(training, model, NAMES, mesh_of(1, 1, fsdp=2))
    with program.axis_rules():
        lowered = program.jit().lower(program.abstract_state(), to_global(program.mesh, mixed(2)))
    text = lowered.compile().as_text()
    assert re.search(r"f32\[2,(1024,8|8,1024)\]", text)
    assert not re.search(r"f32\[2,(2048,8|8,2048)\]", text)

"""A step with groups of directions: sums, rates, meshes, parts, and nothing where it is off."""

import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

from m4.model.gates.switch import switch
from m4.parallel.layout import to_global
from m4.settings import SettingError
from m4.train.average import averaged
from m4.train.multitask.groups import Listed, by_language, by_side
from m4.train.multitask.surgery import GradientVaccine, PCGrad
from m4.train.program import train_program
from tests.shared import SMALL_MOE
from tests.train.test_step import SHALLOW, a_batch, mesh_of
from tests.train.trainers import training_of

NAMES = ["en-gl", "gl-en", "en-de", "de-en"]
# A row is a group of tokens and nothing is drawn at random: the same on every mesh.
GATE = functools.partial(switch, jitter=0.0)
MODEL = SHALLOW.clone(moe=functools.partial(SMALL_MOE, gate=GATE), directions=4)
GRADIENT = optax.sgd(1.0)  # the new weights are the old ones less the gradients


def mixed(rows: int = 8) -> dict[str, np.ndarray]:
    """All four directions in every row, their shares differing."""
    batch = a_batch(rows)
    random = np.random.default_rng(1)
    ids = np.sort(random.integers(0, 4, (rows, 8), dtype=np.int32) ** 2 // 3, axis=1)
    return {**batch, "direction_ids": ids, "encoder_direction_ids": ids.copy()}


class Without:
    """Groups whose gradients are left as they are."""

    granularity = "model"

    def __init__(self, groups):
        self.groups = groups

    def initial_state(self, groups):
        return np.zeros(0, np.float32)

    def weights(self, gram_GG, state, key):
        return jax.numpy.ones(len(gram_GG)), state


def step_of(mesh, model=MODEL, optimizer: Any = GRADIENT, batch=None, steps=1, **settings):
    """(weights before, weights after, metrics)."""
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


@pytest.mark.thorough
def test_a_language_that_is_not_in_the_batch_changes_nothing():
    batch = mixed()
    batch["direction_ids"] = batch["direction_ids"] % 2
    surgery = PCGrad(Listed({"gl": ["gl"], "de": ["de"]}))
    _, found, _ = step_of(mesh_of(1, 1), batch=batch, gradients=surgery)
    _, plain, _ = step_of(mesh_of(1, 1), batch=batch)
    assert_close(found, plain, atol=1e-6)


@pytest.mark.thorough
def test_loss_weights_multiply_a_directions_part_of_the_gradient():
    # By language: the gradient is gl + de; with weights 3 of gl it is 3 gl + de.
    dense, one = SHALLOW.clone(moe=None), mesh_of(1, 1)
    gradient = {}
    for name, weights in {"all": None, "3": {"gl": 3.0}, "0": {"gl": 0, "de-en": 1.0}}.items():
        before, after, _ = step_of(one, dense, loss_weights=weights)
        gradient[name] = jax.tree.map(np.subtract, before, after)
    wanted = jax.tree.map(lambda x, de: 3 * (x - de) + de, gradient["all"], gradient["0"])
    assert_close(gradient["3"], wanted, atol=1e-5)


@pytest.mark.thorough
def test_a_batch_of_one_direction_moves_at_its_rate():
    # Whatever the optimizer is: Adam's first step has the length of the rate, not of the gradient.
    batch = mixed()
    batch["direction_ids"][:] = 0
    for optimizer in (GRADIENT, optax.adam(0.1), averaged(5, optimizer=lambda _: optax.adam(0.1))):
        moved = []
        for rates in (None, {"en-gl": 2.0, "de": 5.0}):
            before, after, _ = step_of(
                mesh_of(1, 1), SHALLOW.clone(moe=None), optimizer, batch, learning_rates=rates
            )
            moved.append(jax.tree.map(np.subtract, after, before))
        assert_close(moved[1], jax.tree.map(lambda x: 2 * x, moved[0]), atol=1e-6)


@pytest.mark.thorough
def test_a_row_that_one_direction_alone_uses_has_its_rate():
    # Piece 31 is a source of en-gl only; piece 30 of all.
    batch = mixed()
    batch["encoder_input_tokens"] = np.where(batch["direction_ids"] == 0, 31, 30).astype(np.int32)
    batch["decoder_input_tokens"] = batch["decoder_input_tokens"] % 29
    batch["decoder_segment_ids"] = batch["encoder_segment_ids"] = batch["direction_ids"] + 1
    model = SHALLOW.clone(moe=None, source_vocab_size=32)
    moved = []
    for rates in (None, {"en-gl": 2.0}):
        before, after, _ = step_of(
            mesh_of(1, 1), model, optax.adam(0.1), batch, learning_rates=rates
        )
        rows = before["source_token_embedder"]["embedding"]
        moved.append(after["source_token_embedder"]["embedding"] - rows)
    np.testing.assert_allclose(moved[1][31], 2 * moved[0][31], rtol=1e-4)
    ratio = moved[1][30] / moved[0][30]
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

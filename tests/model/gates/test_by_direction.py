"""Routing by task: loops over tokens, tasks of sentences, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.model.gates.by_direction import by_direction
from m4.settings import SettingError
from m4.train.step import apply_model
from tests.model.gates.golden import best, slopes, softmax
from tests.shared import SMALL_MOE, run_layer, small_layer, small_model
from tests.train.test_step import a_batch

M, E, T = 6, 5, 3
# Four directions of three tasks.
TASKS = (2, 0, 2, 1)
LAYER = small_layer(
    num_experts=E, gate=by_direction, directions=len(TASKS), tasks=TASKS, group_tokens=0,
    train_capacity_factor=None,
)  # fmt: skip


def case():
    rng = np.random.default_rng(0)
    x_BLM = rng.normal(size=(3, 8, M)).astype(np.float32)
    mask_BL = rng.random((3, 8)) < 0.8
    direction_BL = rng.integers(0, len(TASKS), (3, 8)).astype(np.int32)
    params = LAYER.init(jax.random.key(1), x_BLM, mask_BL, None, direction_BL, deterministic=True)
    params = jax.device_get(params["params"])
    params["router"]["kernel"] = rng.normal(0, 0.5, (M, E)).astype(np.float32)
    return x_BLM, mask_BL, direction_BL, params


def by_loops(kernels, experts, x_BLM, mask_BL, direction_BL):
    """Returns (outputs, auxiliary loss), computed token by token in float64."""
    logits_TE = kernels["tasks"] @ kernels["router"]
    y_BLM, chosen_E, probs_E = np.zeros(x_BLM.shape), np.zeros(E), np.zeros(E)
    for b, t in zip(*np.nonzero(mask_BL), strict=True):
        logits = logits_TE[TASKS[direction_BL[b, t]]]
        expert = best(logits, 2)
        for e, weight in zip(expert, softmax(logits[expert]), strict=True):
            y_BLM[b, t] += weight * np.maximum(x_BLM[b, t] @ experts["wi"][e], 0) @ experts["wo"][e]
            chosen_E[e] += 0.5
        probs_E += softmax(logits)
    count = mask_BL.sum()
    return y_BLM, E * chosen_E @ probs_E / count**2


def test_outputs_loss_and_gradients_equal_loops():
    x_BLM, mask_BL, direction_BL, params = case()
    assert params["tasks"]["kernel"].shape == (T, M)
    factor = np.random.default_rng(2).normal(size=x_BLM.shape)
    experts = {
        name: np.array(params["experts"][name]["kernel"], np.float64) for name in ("wi", "wo")
    }

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def found(params):
        y_BLM, metrics = run_layer(LAYER, params, x_BLM, mask_BL, None, direction_BL)
        loss = metrics["auxiliary_loss"]
        return jnp.sum(y_BLM * factor) + loss, (y_BLM, loss)

    (_, (y_BLM, loss)), gradients = found(params)
    kernels = {name: np.array(params[name]["kernel"], np.float64) for name in ("tasks", "router")}

    def expected(kernels):
        return by_loops(kernels, experts, x_BLM, mask_BL, direction_BL)

    outputs, its_loss = expected(kernels)
    np.testing.assert_allclose(y_BLM, outputs, atol=1e-5)
    np.testing.assert_allclose(loss, its_loss, rtol=1e-6)
    for name, kernel in kernels.items():

        def total(moved, name=name):
            outputs, its_loss = expected({**kernels, name: moved})
            return np.sum(outputs * factor) + its_loss

        np.testing.assert_allclose(gradients[name]["kernel"], slopes(total, kernel), atol=2e-4)


@pytest.mark.parametrize("tasks", [(), (0, 0)])
def test_all_tokens_of_a_task_have_the_same_experts_in_every_layer(tasks):
    moe = functools.partial(SMALL_MOE, gate=by_direction, num_experts=16)
    model = small_model(moe=moe, directions=2, tasks=tasks)
    assert model.by_task
    assert not small_model(directions=2).by_task
    batch = {name: jnp.asarray(x) for name, x in a_batch().items()}
    x = jnp.ones((1, 8), jnp.int32)
    params = model.init(jax.random.key(0), x, x, x, enable_dropout=False)["params"]
    _, sown = jax.jit(lambda params: apply_model(model, params, batch, None))(params)
    for stack, name in (("encoder", "encoder_input_tokens"), ("decoder", "decoder_target_tokens")):
        count_DE = np.asarray(sown[f"{stack}_0"]["moe"]["assigned_DE"][0])
        for d, count_E in enumerate(count_DE):
            tokens = (batch[name][d::2] > 0).sum()  # a row is a sentence, directions take turns
            assert sorted(count_E[count_E > 0]) == [tokens, tokens]
        same = np.array_equal(count_DE[0] > 0, count_DE[1] > 0)
        assert same == bool(tasks)


def test_unknown_directions_are_refused():
    x_BLM, mask_BL, direction_BL, params = case()
    said = r"^MoeLayer\.gate = 'by_direction': must be one without tasks where"
    with pytest.raises(SettingError, match=said):
        LAYER.apply({"params": params}, x_BLM, mask_BL, deterministic=True)
    none = LAYER.clone(directions=0, tasks=())
    with pytest.raises(SettingError, match=said):
        none.init(jax.random.key(0), x_BLM, mask_BL, None, direction_BL, deterministic=True)

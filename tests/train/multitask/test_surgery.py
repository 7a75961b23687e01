"""PCGrad and Gradient Vaccine: by hand, and equal to a slow obvious reference."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from m4.train.multitask import grouped as gram
from m4.train.multitask.surgery import GradientVaccine, PCGrad, order_of

KEY = jax.random.key(7, impl="threefry2x32")
Vectors = list[np.ndarray]
Orders = Callable[[int], list[int]]  # i -> the order in which it looks at the others


def pcgrad(gradients: Vectors, order: Orders) -> np.ndarray:
    """2001.06782, Algorithm 1."""
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
    """2010.05874, Algorithm 1, of one part of a model; and the new targets."""
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
    """(the step's gradient, new state) of vectors."""
    stacked = {"kernel": np.stack(gradients).astype(np.float32)}
    begun = surgery.initial_state(len(gradients)) if state is None else state
    products = gram.gram(stacked, "model")[0]
    weights, begun = jax.jit(surgery.weights)(products, begun, key)
    return gram.weighted(stacked, weights[None], "model")["kernel"], begun


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
    by_layer = gram.gram(stacked, "layer")
    np.testing.assert_allclose(by_layer[0], np.full((2, 2), 3.0))  # "embedding" comes first
    for layer in (0, 1):
        np.testing.assert_allclose(by_layer[1 + layer], kernel[:, layer] @ kernel[:, layer].T)
    np.testing.assert_allclose(gram.gram(stacked, "model")[0], by_layer.sum(axis=0))
    weights = np.array([[1, 0], [1, 1], [0, 2]], np.float32)
    found = gram.weighted(stacked, jax.numpy.asarray(weights), "layer")
    found_kernel = found["encoder_blocks"]["layer_0"]["kernel"]
    np.testing.assert_allclose(found_kernel[0], kernel[0, 0] + kernel[1, 0])
    np.testing.assert_allclose(found_kernel[1], 2 * kernel[1, 1])

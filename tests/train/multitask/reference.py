"""PCGrad and Gradient Vaccine as the papers' algorithms read, on whole vectors, one by one."""

from collections.abc import Callable

import numpy as np

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

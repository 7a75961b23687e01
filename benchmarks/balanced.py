"""Balanced routing for benchmarks of training.

Each expert is the first choice of equally many tokens, and the second choice of as many.

An untrained router is not balanced on random tokens. A peer would keep two thirds of the choices
and compute only those, while m4 computes all slots, so the work would differ.
"""

import numpy as np

# Factor of the router's own logits, which keep their gradients but decide nothing.
ROUTER = 0.01


def preferences(tokens: int, experts: int) -> np.ndarray:
    """Returns logits [tokens, experts]: 2 for the first choice, 1 for the second, 0 for others.

    Among `experts` consecutive tokens, all first choices differ, and so do all second ones. Thus
    the buffer of a row or group is full if its length is a multiple of `experts`.
    """
    random = np.random.default_rng(0)
    result = np.zeros((tokens, experts), np.float32)
    for start in range(0, tokens, experts):
        order = random.permutation(experts)
        rows = np.arange(start, min(start + experts, tokens))
        result[rows, order[rows - start]] = 2
        result[rows, np.roll(order, -1)[rows - start]] = 1
    return result

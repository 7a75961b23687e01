"""Balanced routing for benchmarks of training.

Each expert is as many tokens' first choice, and as many tokens' second.

An untrained router is not balanced on random tokens. A peer then keeps two thirds of the choices
and computes only those, where m4 computes all slots: two different amounts of work.
"""

import numpy as np

# What is left of the router's own logits: they have their gradients, and decide nothing.
ROUTER = 0.01


def preferences(tokens: int, experts: int) -> np.ndarray:
    """Logits [tokens, experts]: 2 for the first choice, 1 for the second, 0 for the others.

    Of each `experts` tokens in a row all have another first choice, and another second one; so a
    buffer of a row, or of a group, is filled when the row or group is a multiple of `experts` long.
    """
    random = np.random.default_rng(0)
    result = np.zeros((tokens, experts), np.float32)
    for start in range(0, tokens, experts):
        order = random.permutation(experts)
        rows = np.arange(start, min(start + experts, tokens))
        result[rows, order[rows - start]] = 2
        result[rows, np.roll(order, -1)[rows - start]] = 1
    return result

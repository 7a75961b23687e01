"""Averages of parameters: the paper's recursion, and what a sum with written-out weights gives."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from m4.settings import SettingError
from m4.train.average import Averaged, averaged, from_items, items, updated, used
from m4.train.step import TrainState

START = {"a": {"kernel": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)}}


def walk(eta, steps):
    """Returns the states of `steps` steps at rate 0.1 down a slope equal to the parameter."""
    optimizer = averaged(steps, optimizer=lambda total: optax.sgd(0.1), eta=eta)
    params, state = jax.tree.map(jax.numpy.asarray, START), optimizer.init(START)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
        yield params, state


def shares(eta, steps):
    """Returns the share of each step's parameters after the last one."""
    given = [(eta + 1) / (t + eta) for t in range(1, steps + 1)]
    return [c * np.prod([1 - later for later in given[i + 1 :]]) for i, c in enumerate(given)]


@pytest.mark.parametrize("eta", [0.0, 1.0, 8.0])
def test_the_average_is_the_weighted_sum_of_all_steps_parameters(eta):
    seen = []
    for number, (params, state) in enumerate(walk(eta, 7), 1):
        # Gradient descent on x^2 / 2 with rate 0.1: 0.9^t of the start; the average moves no step.
        seen.append(0.9**number * START["a"]["kernel"])
        np.testing.assert_allclose(params["a"]["kernel"], seen[-1], rtol=1e-5)
        wanted = sum(c * x for c, x in zip(shares(eta, number), seen, strict=True))
        np.testing.assert_allclose(state.average["a"]["kernel"], wanted, rtol=1e-5)
        assert int(state.count) == number


def test_without_an_optimizer_it_is_refused():
    with pytest.raises(SettingError, match=r"^averaged\.optimizer = None: must be a reference"):
        averaged(10)


def test_a_checkpoint_has_the_average_once_and_gives_the_state_back():
    *_, (params, optimizer) = walk(8.0, 3)
    state = TrainState(np.int32(3), params, optimizer)
    assert used(state) is optimizer.average
    trees = items(state)
    assert trees["average"] is optimizer.average
    assert len(jax.tree.leaves(trees["optimizer"])) == len(jax.tree.leaves(optimizer)) - 1
    back = from_items(state, state.step, trees)
    assert isinstance(back.optimizer, Averaged)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_the_average_is_of_the_steps_as_they_are_taken():
    """Updates that are scaled behind the optimizer (rates by direction) are scaled in it too."""
    optimizer = averaged(5, optimizer=lambda total: optax.sgd(0.1))
    state = optimizer.init(START)
    updates, after = updated(
        optimizer, START, state, START, lambda tree: jax.tree.map(lambda x: 3 * x, tree)
    )
    # The first step's share is 1: the average is the parameters, 0.7 times the start.
    both: list[Any] = [optax.apply_updates(START, updates), after.average]
    for found in both:
        np.testing.assert_allclose(found["a"]["kernel"], 0.7 * START["a"]["kernel"], rtol=1e-6)


def test_without_an_average_the_parameters_are_used():
    state = TrainState(np.int32(0), START, optax.sgd(0.1).init(START))
    assert used(state) is START
    assert items(state).keys() == {"params", "optimizer"}
    assert from_items(state, state.step, items(state)) == state

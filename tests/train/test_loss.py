"""Cross-entropy against the same written with log_softmax; gradients against automatic ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m4.train.loss import cross_entropy


def plain(logits_BTV, targets_BT, smoothing, z_loss):
    """The definition: soft targets times -log_softmax, and z_loss times log(Z)^2."""
    vocab = logits_BTV.shape[-1]
    one_hot = jax.nn.one_hot(targets_BT, vocab)
    soft = (1 - smoothing) * one_hot + smoothing / vocab
    log_z = jax.nn.logsumexp(logits_BTV, axis=-1)
    logp = jax.nn.log_softmax(logits_BTV)
    return -jnp.sum(soft * logp, axis=-1) + z_loss * log_z**2


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
def test_equals_the_definition(smoothing, z_loss):
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(2, 3, 7)).astype(np.float32)
    targets: Any = rng.integers(0, 7, (2, 3))
    weights = rng.random((2, 3)).astype(np.float32)

    def ours(x):
        return jnp.sum(cross_entropy(x, targets, smoothing, z_loss).training_BT * weights)

    def theirs(x):
        return jnp.sum(plain(x, targets, smoothing, z_loss) * weights)

    our, their = (jax.jit(jax.value_and_grad(loss))(logits) for loss in (ours, theirs))
    np.testing.assert_allclose(our[0], their[0], rtol=1e-6)
    np.testing.assert_allclose(our[1], their[1], atol=1e-6)


def test_nll_is_not_smoothed():
    # Uniform logits over 4: -log(1/4) = log 4, whatever the smoothing.
    loss = cross_entropy(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32), 0.3, 0.5)
    np.testing.assert_allclose(loss.nll_BT, np.log(4), rtol=1e-6)
    # The training loss adds 0.5 * log(4)^2; smoothing changes nothing where all are equal.
    np.testing.assert_allclose(loss.training_BT, np.log(4) + 0.5 * np.log(4) ** 2, rtol=1e-6)

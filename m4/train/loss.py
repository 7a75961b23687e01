"""Cross-entropy over the vocabulary with label smoothing and z-loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array


@struct.dataclass
class TokenLoss:
    """Losses of each target token, float32 [B, T]."""

    nll_BT: Array  # negative log-likelihood in nats
    training_BT: Array  # the loss that training minimises


def cross_entropy(
    logits_BTV: Array, targets_BT: Array, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> TokenLoss:
    """Returns -log p(target), and the training loss with smoothed targets and z-loss.

    Only `training_BT` has a gradient. It is written by hand: one pass over the logits instead of
    the several of automatic differentiation.

    Args:
        label_smoothing: The target has probability 1 - label_smoothing, and all V ids share
            label_smoothing evenly (Szegedy et al. 2016, arXiv 1512.00567).
        z_loss: Factor of log(Z)^2, which keeps log(Z) near 0 (Mesh TensorFlow, T5X).
    """
    # custom_vjp hides the types of the function that it wraps.
    pair: Any = _cross_entropy(logits_BTV, targets_BT, label_smoothing, z_loss)
    return TokenLoss(*pair)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(
    logits_BTV: Array, targets_BT: Array, label_smoothing: float, z_loss: float
) -> tuple[Array, Array]:
    return _forward(logits_BTV, targets_BT, label_smoothing, z_loss)[0]


def _forward(logits_BTV: Array, targets_BT: Array, label_smoothing: float, z_loss: float):
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nll_BT = log_z_BT - target_BT
    training_BT = nll_BT
    if label_smoothing:
        uniform_BT = log_z_BT - jnp.mean(logits_BTV, axis=-1)
        training_BT = (1.0 - label_smoothing) * nll_BT + label_smoothing * uniform_BT
    training_BT = training_BT + z_loss * jnp.square(log_z_BT)
    return (nll_BT, training_BT), (logits_BTV, targets_BT, log_z_BT)


def _backward(label_smoothing: float, z_loss: float, saved, cotangents: tuple[Array, Array]):
    logits_BTV, targets_BT, log_z_BT = saved
    vocab = logits_BTV.shape[-1]
    softmax_BTV = jnp.exp(logits_BTV - log_z_BT[..., None])
    is_target_BTV = targets_BT[..., None] == jnp.arange(vocab, dtype=targets_BT.dtype)[None, None]
    _, training_BT = cotangents
    # The barrier makes XLA compute these once a token, not once for each of the V ids.
    scale_BT, target_BT, other_BT = jax.lax.optimization_barrier(
        (
            training_BT * (1.0 + 2.0 * z_loss * log_z_BT),
            training_BT * (1.0 - label_smoothing + label_smoothing / vocab),
            training_BT * (label_smoothing / vocab),
        )
    )
    smoothed_BTV = jnp.where(is_target_BTV, target_BT[..., None], other_BT[..., None])
    return softmax_BTV * scale_BT[..., None] - smoothed_BTV, None


_cross_entropy.defvjp(_forward, _backward)

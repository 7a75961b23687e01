"""Transport by all-to-all in two stages: inside a node over `expert`, between nodes over `node`.

HetuMoE (arXiv 2203.14685, section 3.2) first collects the rows of a node's devices for each other
node; each device then sends those that its peers gave it, as in Tutel's two-dimensional all-to-all
(arXiv 2206.03382). With N nodes of X devices, a device sends N - 1 messages between nodes instead
of (N - 1) X, each X times as large, at the price of sending the same bytes again inside the node.
"""

import jax.numpy as jnp
from jax import lax

from m4.model.dispatch.all_to_all import by_exchange
from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.settings import configurable


@configurable
def hierarchical_all_to_all(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens like `all_to_all`, by two exchanges in each direction.

    A mesh without `node`, or with one device per node, has only one stage.
    """
    return by_exchange("hierarchical_all_to_all", x_GSM, routing, experts, _there, _back)


def _there(x_EGCM: Array, axes: tuple[str, ...]) -> Array:
    """Exchanges experts by (node, device, own) for groups in that order; inside the node first."""
    own = len(axes)
    x = x_EGCM.reshape(*map(lax.axis_size, axes), -1, *x_EGCM.shape[1:])
    for axis in reversed(range(own)):
        # The axis held the destination before the exchange, and holds the origin after it.
        x = lax.all_to_all(x, axes[axis], split_axis=axis, concat_axis=axis, tiled=True)
    x = jnp.moveaxis(x, own, 0)
    return x.reshape(x.shape[0], -1, *x.shape[-2:])


def _back(x_EGCM: Array, axes: tuple[str, ...]) -> Array:
    """Exchanges groups by (node, device, own) for experts in that order; between nodes first."""
    own = len(axes)
    x = x_EGCM.reshape(x_EGCM.shape[0], *map(lax.axis_size, axes), -1, *x_EGCM.shape[2:])
    x = jnp.moveaxis(x, 0, own)
    for axis in range(own):
        x = lax.all_to_all(x, axes[axis], split_axis=axis, concat_axis=axis, tiled=True)
    return x.reshape(-1, *x.shape[-3:])

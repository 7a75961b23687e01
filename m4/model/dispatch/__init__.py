"""How tokens reach their experts: one `Transport` a file, all with the same result."""

import dataclasses
from typing import Protocol

from jax import lax
from jax.sharding import PartitionSpec

from m4.model.experts import Experts
from m4.model.routing import Array, Routing


class Transport(Protocol):
    """Sends tokens to their slots, lets experts work on [E, G, C, M], brings the sum back.

    y_GSM = sum over choices that have a slot of weight * expert(x); 0 for a token without any.
    """

    def __call__(self, x_GSM: Array, routing: Routing, experts: Experts) -> Array: ...


def layout(experts: Experts, kernels: PartitionSpec, keep_EG1F: PartitionSpec) -> Experts:
    """The specs of a tree of experts, for `jax.shard_map`."""
    return dataclasses.replace(
        experts,
        inward=(kernels,) * len(experts.inward),
        outward=kernels,
        keep_EG1F=None if experts.keep_EG1F is None else keep_EG1F,
    )


def own(experts: Experts, axes: tuple[str, ...]) -> Experts:
    """In a manual region: experts as if each device along these mesh axes had separate kernels.

    Their gradients are then summed over the axes here. Automatic differentiation would see to that
    by itself, but not through products whose gradients are written by hand.
    """
    if not axes:
        return experts
    inward, outward = lax.pcast((experts.inward, experts.outward), axes, to="varying")
    return dataclasses.replace(experts, inward=inward, outward=outward)

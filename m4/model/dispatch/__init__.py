"""How tokens reach their experts: one `Transport` a file, all with the same result."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
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


def by_devices(
    on_a_device: Callable[..., Array], over: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Array]:
    """`jax.shard_map` over these axes of the mesh. Others, "model" above all, are left to the
    partitioner, but for axes of one device: a kernel for TPUs allows no axis that is left."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = {name for name, size in mesh.shape.items() if size == 1}
    return jax.shard_map(
        on_a_device,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*over} | alone - {*mesh.manual_axes},
        # Kernels do not declare which axes their results vary over.
        check_vma=False,
    )

"""Transports bring tokens to their experts and back: one per file, all with the same result.

This file has their protocol and the manual regions over the mesh that they share, in which a device
has its own groups, and its own or all experts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from m4.model.feed_forward import Experts
from m4.model.layers import constrain
from m4.model.routing import Array, Routing
from m4.parallel.mesh import check_divides, split_axes


class Transport(Protocol):
    """Sends tokens to their slots, applies the experts, and brings the results back.

    y_GSM is the sum of weight * expert(x) over a token's choices with a slot, or 0 without any.
    """

    def __call__(self, x_GSM: Array, routing: Routing, experts: Experts) -> Array: ...


def experts_over(name: str, x_GSM: Array, routing: Routing) -> tuple[str, ...]:
    """Returns the mesh axes over which experts are sharded, or () if they are not.

    Raises:
        SettingError: Experts or groups do not divide over their axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = split_axes(mesh, "expert")
    if axes:
        # A transport does not know whether a model trains or translates.
        groups = (
            "number of groups (tokens / MoeLayer.group_tokens; tokens of Training.batch_size in "
            "training, of Decoding.batch_rows in translation)"
        )
        check_divides(mesh, name, routing.num_experts, "expert", "MoeLayer.num_experts")
        check_divides(mesh, name, x_GSM.shape[0], "batch", groups)
    return axes


def by_annotation(sent_EGCM: Array, experts: Experts) -> Array:
    """Applies the experts to slots sharded by groups, which the partitioner exchanges.

    Each constraint that shards E is next to one that shards G: without that pair, Shardy gathers
    everything on every device instead of making one all-to-all.
    """
    groups, shards = (None, "batch", None, "embed"), ("expert", "expert_replicas", None, "embed")
    done_EGCM = experts(constrain(constrain(sent_EGCM, groups), shards))
    return constrain(constrain(done_EGCM, shards), groups)


def by_groups(
    run: Callable[..., Array], x_GSM: Array, routing: Routing, experts: Experts, *, own: bool
) -> Array:
    """Applies (x_GSM, expert_GSK, position_GSK, weight_GSK, experts) -> y_GSM on each device.

    A device has its own groups, and all experts or, with `own`, its own ones. Without `own`, groups
    that do not divide over the devices are computed by all of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    over, shards, replicas = (
        split_axes(mesh, axis) for axis in ("batch", "expert", "expert_replicas")
    )
    plan = routing.expert_GSK, routing.position_GSK, routing.weight_GSK
    kernels, keep = PartitionSpec(shards), PartitionSpec(shards, replicas)
    if not own:
        if not over or x_GSM.shape[0] % math.prod(mesh.shape[name] for name in over) != 0:
            return run(x_GSM, *plan, experts)
        kernels, keep = PartitionSpec(), PartitionSpec(None, over)
    split: Any = dataclasses.replace(
        experts,
        inward=(kernels,) * len(experts.inward),
        outward=kernels,
        keep_EG1F=None if experts.keep_EG1F is None else keep,
    )
    # The partitioner keeps the other axes, above all "model". One device needs no region.
    alone = {name for name, size in mesh.shape.items() if size == 1}
    return jax.shard_map(
        run,
        in_specs=(*(PartitionSpec(over),) * 4, split),
        out_specs=PartitionSpec(over),
        axis_names={*over} | alone - {*mesh.manual_axes},
        check_vma=False,  # not all products declare which axes they vary over
    )(x_GSM, *plan, experts)

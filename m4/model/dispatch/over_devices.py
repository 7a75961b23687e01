"""Manual regions over the mesh in which a device has its own groups, and its own or all experts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.parallel.mesh import check_divides, split_axes

# (x_GSM, expert_GSK, position_GSK, weight_GSK, experts) -> y_GSM, on each device.
OnADevice = Callable[..., Array]

# A transport does not know whether it trains or translates.
_GROUPS = (
    "number of groups (tokens / MoeLayer.group_tokens; tokens of Training.batch_size in training, "
    "of Decoding.batch_rows in translation)"
)


def experts_over(name: str, x_GSM: Array, routing: Routing) -> tuple[str, ...]:
    """Returns the mesh axes that the experts are sharded over; () where they are whole.

    Raises:
        SettingError: Experts or groups do not divide over their axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = split_axes(mesh, "expert")
    if axes:
        check_divides(mesh, name, routing.num_experts, "expert", "MoeLayer.num_experts")
        check_divides(mesh, name, x_GSM.shape[0], "batch", _GROUPS)
    return axes


def by_expert_shards(
    on_a_device: OnADevice, x_GSM: Array, routing: Routing, experts: Experts
) -> Array:
    """Runs `on_a_device` with each device's groups and its own experts."""
    mesh = jax.sharding.get_abstract_mesh()
    tokens_over, sharded_over, groups_over = (
        split_axes(mesh, axis) for axis in ("batch", "expert", "expert_replicas")
    )
    keep = PartitionSpec(sharded_over, groups_over)
    specs = _specs(experts, PartitionSpec(sharded_over), keep)
    return _by_devices(on_a_device, tokens_over, specs, x_GSM, routing, experts)


def by_own_groups(
    on_a_device: OnADevice, x_GSM: Array, routing: Routing, experts: Experts
) -> Array:
    """Runs `on_a_device` with each device's groups and all experts.

    Groups that do not divide over the devices are worked on by all of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = split_axes(mesh, "batch")
    if not axes or x_GSM.shape[0] % math.prod(mesh.shape[name] for name in axes) != 0:
        plan = routing.expert_GSK, routing.position_GSK, routing.weight_GSK
        return on_a_device(x_GSM, *plan, experts)
    specs = _specs(experts, PartitionSpec(), PartitionSpec(None, axes))
    return _by_devices(on_a_device, axes, specs, x_GSM, routing, experts)


def _specs(experts: Experts, kernels: PartitionSpec, keep_EG1F: PartitionSpec) -> Experts:
    return dataclasses.replace(
        experts,
        inward=(kernels,) * len(experts.inward),
        outward=kernels,
        keep_EG1F=None if experts.keep_EG1F is None else keep_EG1F,
    )


def _by_devices(
    on_a_device: OnADevice,
    over: tuple[str, ...],
    specs: Any,
    x_GSM: Array,
    routing: Routing,
    experts: Experts,
) -> Array:
    """Runs `on_a_device` as a `jax.shard_map` over these axes, along which groups are sharded.

    Other axes, above all "model", are left to the partitioner, except those of one device: a TPU
    kernel allows no axis that is left.
    """
    mesh = jax.sharding.get_abstract_mesh()
    alone = {name for name, size in mesh.shape.items() if size == 1}
    by_groups = PartitionSpec(over)
    return jax.shard_map(
        on_a_device,
        in_specs=(*(by_groups,) * 4, specs),
        out_specs=by_groups,
        axis_names={*over} | alone - {*mesh.manual_axes},
        # Kernels do not declare which axes their results vary over.
        check_vma=False,
    )(x_GSM, routing.expert_GSK, routing.position_GSK, routing.weight_GSK, experts)

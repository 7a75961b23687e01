"""Tokens go to the devices of their experts and back by explicit all-to-all exchanges.

What GShard (arXiv 2006.16668, section 3.2) leaves to its partitioner, written out: each device
fills the slots of its groups, sends every expert its slots, and gets the results back. Nothing
but the two exchanges crosses devices, whatever the partitioner thinks of the rest. Slots and
combining are `gather`'s.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from m4.model.dispatch import by_devices, layout
from m4.model.dispatch import gather as local
from m4.model.experts import Experts
from m4.model.routing import Array, Routing
from m4.parallel.mesh import check_divides, split_axes
from m4.settings import configurable

Exchange = Callable[[Array, tuple[str, ...]], Array]


@configurable
def all_to_all(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """The same result as `einsum`; one exchange there, one back, each over node x expert.

    Without a mesh, or where experts are not sharded, it is `gather`: there is nothing to exchange.

    Raises:
        ValueError: groups or experts that do not divide over the devices.
    """
    return by_exchange("all_to_all", x_GSM, routing, experts, there, back)


def there(x_EGCM: Array, axes: tuple[str, ...]) -> Array:
    return lax.all_to_all(x_EGCM, axes, split_axis=0, concat_axis=1, tiled=True)


def back(x_EGCM: Array, axes: tuple[str, ...]) -> Array:
    return lax.all_to_all(x_EGCM, axes, split_axis=1, concat_axis=0, tiled=True)


# A transport does not know what it is asked for.
_GROUPS = (
    "number of groups (tokens / MoeLayer.group_tokens; tokens of Training.batch_size in training, "
    "of Decoding.batch_rows in translation)"
)


def by_exchange(
    name: str, x_GSM: Array, routing: Routing, experts: Experts, there: Exchange, back: Exchange
) -> Array:
    """What the exchanging implementations share.

    Args:
        there: in a manual region over these mesh axes: all experts' slots of this device's groups
            -> its experts' slots of the groups of all devices along the axes, in their order:
            [E, G/(D X), C, M] -> [E/X, G/D, C, M], X devices along the axes and D along "data".
        back: the opposite.
    """
    axes = experts_over(name, x_GSM, routing)
    if not axes:
        return local.gather(x_GSM, routing, experts)
    E, C = routing.num_experts, routing.capacity

    def on_a_device(x_GSM, expert_GSK, position_GSK, weight_GSK, experts):
        slots = local.slots_of(expert_GSK, position_GSK, E, C)
        sent_EGCM = local.by_expert(local.send(x_GSM, slots), E)
        # The experts' type is what travels: half the bytes in bfloat16.
        sent_EGCM = there(sent_EGCM.astype(experts.outward.dtype), axes)
        done_EGCM = back(experts(sent_EGCM), axes).astype(x_GSM.dtype)
        return local.combine(local.by_group(done_EGCM), weight_GSK, slots)

    return by_expert_shards(on_a_device, x_GSM, routing, experts)


def experts_over(name: str, x_GSM: Array, routing: Routing) -> tuple[str, ...]:
    """The mesh axes that experts are sharded over, of the implementation of that name.

    Raises:
        ValueError: groups or experts that do not divide over their devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = split_axes(mesh, "expert")
    if axes:
        check_divides(mesh, name, routing.num_experts, "expert", "MoeLayer.num_experts")
        check_divides(mesh, name, x_GSM.shape[0], "batch", _GROUPS)
    return axes


def by_expert_shards(
    on_a_device: Callable[..., Array], x_GSM: Array, routing: Routing, experts: Experts
) -> Array:
    """on_a_device(x_GSM, expert_GSK, position_GSK, weight_GSK, experts) with each device's groups
    and its experts."""
    mesh = jax.sharding.get_abstract_mesh()
    tokens_over, sharded_over, groups_over = (
        split_axes(mesh, axis) for axis in ("batch", "expert", "expert_replicas")
    )

    by_groups = PartitionSpec(tokens_over)
    keep = PartitionSpec(sharded_over, groups_over)
    specs = *(by_groups,) * 4, layout(experts, PartitionSpec(sharded_over), keep)
    return by_devices(on_a_device, tokens_over, specs, by_groups)(
        x_GSM, routing.expert_GSK, routing.position_GSK, routing.weight_GSK, experts
    )

"""Transport of tokens to the devices of their experts by explicit all-to-all exchanges.

It writes out what GShard (arXiv 2006.16668, section 3.2) leaves to its partitioner: each device
fills the slots of its groups, sends every expert its slots, and gets the results back. Slots and
combining are those of `gather`.
"""

import functools
from collections.abc import Callable

from jax import lax

from m4.model.dispatch import by_groups, experts_over
from m4.model.dispatch import gather as local
from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.settings import configurable

Exchange = Callable[[Array, tuple[str, ...]], Array]


@configurable
def all_to_all(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens by one exchange in each direction, over node x expert.

    Without a mesh, or if experts are not sharded, it is `gather`, as there is nothing to exchange.
    """
    exchange = functools.partial(lax.all_to_all, tiled=True)
    ways = [functools.partial(exchange, split_axis=i, concat_axis=1 - i) for i in (0, 1)]
    return by_exchange("all_to_all", x_GSM, routing, experts, *ways)


def by_exchange(
    name: str, x_GSM: Array, routing: Routing, experts: Experts, there: Exchange, back: Exchange
) -> Array:
    """Carries tokens by the given exchanges.

    Args:
        there: Exchange in a manual region over the experts' mesh axes: all experts' slots of this
            device's groups -> its own experts' slots of the groups of all devices along the axes,
            in their order: [E, G/(D X), C, M] -> [E/X, G/D, C, M], with X devices along the axes
            and D along "data" and "fsdp" together.
        back: The reverse exchange.
    """
    axes = experts_over(name, x_GSM, routing)
    if not axes:
        return local.gather(x_GSM, routing, experts)
    E, C = routing.num_experts, routing.capacity

    def on_a_device(x_GSM, expert_GSK, position_GSK, weight_GSK, experts):
        slots = local.slots_of(expert_GSK, position_GSK, E, C)
        sent_EGCM = local.by_expert(local.send(x_GSM, slots), E)
        # Rows travel in the experts' type, which in bfloat16 is half the bytes.
        sent_EGCM = there(sent_EGCM.astype(experts.outward.dtype), axes)
        done_EGCM = back(experts(sent_EGCM), axes).astype(x_GSM.dtype)
        return local.combine(local.by_group(done_EGCM), weight_GSK, slots)

    return by_groups(on_a_device, x_GSM, routing, experts, own=True)

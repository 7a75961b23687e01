"""Reference transport: one-hot masks and einsums, as in GShard (arXiv 2006.16668), Algorithm 2."""

import jax
import jax.numpy as jnp

from m4.model.dispatch import by_annotation
from m4.model.feed_forward import Experts
from m4.model.layers import constrain
from m4.model.product import full_product
from m4.model.routing import Array, Routing
from m4.settings import configurable


def masks(routing: Routing) -> tuple[Array, Array]:
    """Returns the paper's two masks of a plan: combine_GSEC (float32) and dispatch_GSEC (bool)."""
    expert_GSKE = jax.nn.one_hot(routing.expert_GSK, routing.num_experts, dtype=jnp.float32)
    # Slot -1 has no one-hot entry: its row is all zeros.
    position_GSKC = jax.nn.one_hot(routing.position_GSK, routing.capacity, dtype=jnp.float32)
    combine_GSEC = full_product(
        "GSK,GSKE,GSKC->GSEC", routing.weight_GSK, expert_GSKE, position_GSKC
    )
    dispatch_GSEC = jnp.einsum("GSKE,GSKC->GSEC", expert_GSKE, position_GSKC) > 0
    return combine_GSEC, dispatch_GSEC


@configurable
def einsum(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens by products with the masks (Algorithm 2, lines 3-8)."""
    combine_GSEC, dispatch_GSEC = masks(routing)
    combine_GSEC = constrain(combine_GSEC, ("batch", None, None, None))
    dispatch_GSEC = constrain(dispatch_GSEC, ("batch", None, None, None))
    sent_EGCM = jnp.einsum("GSEC,GSM->EGCM", dispatch_GSEC.astype(x_GSM.dtype), x_GSM)
    done_EGCM = by_annotation(sent_EGCM, experts)
    return jnp.einsum("GSEC,EGCM->GSM", combine_GSEC.astype(x_GSM.dtype), done_EGCM)

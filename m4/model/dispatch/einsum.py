"""One-hot masks and einsums, as GShard (arXiv 2006.16668), Algorithm 2: the reference."""

import jax
import jax.numpy as jnp

from m4.model.experts import Experts
from m4.model.layers import constrain
from m4.model.product import full_product
from m4.model.routing import Array, Routing
from m4.settings import configurable


def masks(routing: Routing) -> tuple[Array, Array]:
    """(combine_GSEC float32, dispatch_GSEC bool): the paper's two masks, from a plan."""
    expert_GSKE = jax.nn.one_hot(routing.expert_GSK, routing.num_experts, dtype=jnp.float32)
    # Slot -1 (none) has no one-hot entry: all zeros.
    position_GSKC = jax.nn.one_hot(routing.position_GSK, routing.capacity, dtype=jnp.float32)
    combine_GSEC = full_product(
        "GSK,GSKE,GSKC->GSEC", routing.weight_GSK, expert_GSKE, position_GSKC
    )
    dispatch_GSEC = jnp.einsum("GSKE,GSKC->GSEC", expert_GSKE, position_GSKC) > 0
    return combine_GSEC, dispatch_GSEC


@configurable
def einsum(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Algorithm 2, lines 3-8. Each E-sharded constraint follows a G-sharded one.

    Without that pair Shardy gathers everything on every device instead of one all-to-all.
    """
    combine_GSEC, dispatch_GSEC = masks(routing)
    combine_GSEC = constrain(combine_GSEC, ("batch", None, None, None))
    dispatch_GSEC = constrain(dispatch_GSEC, ("batch", None, None, None))
    sent_EGCM = jnp.einsum("GSEC,GSM->EGCM", dispatch_GSEC.astype(x_GSM.dtype), x_GSM)
    sent_EGCM = constrain(sent_EGCM, (None, "batch", None, "embed"))
    sent_EGCM = constrain(sent_EGCM, ("expert", "expert_replicas", None, "embed"))
    done_EGCM = experts(sent_EGCM)
    done_EGCM = constrain(done_EGCM, ("expert", "expert_replicas", None, "embed"))
    done_EGCM = constrain(done_EGCM, (None, "batch", None, "embed"))
    return jnp.einsum("GSEC,EGCM->GSM", combine_GSEC.astype(x_GSM.dtype), done_EGCM)

"""k top-1: the experts are split into prototypes, and a token takes the best one of each.

Source: M6-T (arXiv 2105.15082), section 3.2, and HetuMoE's KTop1Gate.py.
"""

import jax
import jax.numpy as jnp

from m4.model.routing import (
    Capacity,
    Routing,
    Tokens,
    assign_positions,
    at_experts,
    balance_loss,
    choice_shares,
    make_routing,
)
from m4.settings import SettingError, Size, checked


@checked
def ktop1(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    prototypes: Size = 2,
    paper_scale: bool = False,
) -> Routing:
    """Routes each token to the best expert of every prototype z: y = sum_z p_z FFN_z(x).

    A prototype is E/Z consecutive experts with a separate softmax; p_z is its largest entry
    (ties: the lowest index), not normalised over prototypes. Prototypes share no expert, so each
    hands out its slots in token order for itself. The auxiliary loss is a top-1 gate's in each
    prototype, (E/Z) * sum_e f_e P_e over the real tokens of a group before capacity, averaged over
    prototypes and groups: 1 when balanced. The z-loss is that of all E logits.

    Args:
        tokens: see `Tokens`; the router matrix is `score("router")`, all prototypes side by side.
        num_experts: E. capacity: see `Capacity`; asked for Z choices.
        prototypes: Z, experts that a token uses.
        paper_scale: the auxiliary loss is the sum over prototypes: Z when balanced.

    Raises:
        SettingError: E is not a multiple of the number of prototypes.
    """
    if num_experts % prototypes:
        raise SettingError("ktop1.prototypes", prototypes, f"a divisor of {num_experts} experts")
    members = num_experts // prototypes
    logits_GSE = tokens.score("router").astype(jnp.float32)
    # A token makes one choice in each prototype: that is axis K; the last one is its members.
    logits = logits_GSE.reshape(*logits_GSE.shape[:2], prototypes, members)
    probs_GSE = jax.nn.softmax(logits).reshape(logits_GSE.shape)
    first_K = members * jnp.arange(prototypes, dtype=jnp.int32)
    expert_GSK = jnp.argmax(logits, axis=-1).astype(jnp.int32) + first_K[None, None, :]
    wants_GSK = jnp.broadcast_to(tokens.mask_GS[..., None], expert_GSK.shape)
    slots = capacity(prototypes)
    aux_loss = balance_loss(
        # Divided by Z, the probabilities of all prototypes together sum to 1, as do the shares.
        probs_GSE / prototypes,
        choice_shares(expert_GSK, num_experts),
        tokens.mask_GS,
    )
    return make_routing(
        expert_GSK,
        assign_positions(expert_GSK, wants_GSK, num_experts, slots),
        at_experts(probs_GSE, expert_GSK),
        mask_GS=tokens.mask_GS,
        wants_GSK=wants_GSK,
        num_experts=num_experts,
        capacity=slots,
        logits_GSE=logits_GSE,
        aux_loss=prototypes * aux_loss if paper_scale else aux_loss,
        ranked=False,
    )

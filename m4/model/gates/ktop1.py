"""k top-1: experts are divided into prototypes, and a token takes the best expert of each.

Source: M6-T (arXiv 2105.15082), section 3.2, and HetuMoE's KTop1Gate.py.
"""

import jax
import jax.numpy as jnp

from m4.model.routing import Capacity, Routing, Tokens, at_experts, balance_loss, plan_choices
from m4.settings import SettingError, Size, checked


@checked
def ktop1(tokens: Tokens, num_experts: int, capacity: Capacity, *, prototypes: Size = 2) -> Routing:
    """Routes each token to the best expert of every prototype z: y = sum_z p_z FFN_z(x).

    A prototype is E/Z consecutive experts with their own softmax; p_z is its largest entry (ties:
    the lowest index), not normalised over prototypes. Prototypes share no expert, so that each
    hands out its own slots in token order. The auxiliary loss is the mean over prototypes of that
    of `switch` (the paper's is the sum); the z-loss is that of all E logits.

    Args:
        prototypes: Number of prototypes, Z, and so of experts per token.

    Raises:
        SettingError: Z does not divide E.
    """
    if num_experts % prototypes:
        raise SettingError("ktop1.prototypes", prototypes, f"a divisor of {num_experts} experts")
    members = num_experts // prototypes
    logits_GSE = tokens.score("router")
    # Axis K counts prototypes, as a token makes one choice in each; the last axis is their experts.
    logits = logits_GSE.reshape(*logits_GSE.shape[:2], prototypes, members)
    probs_GSE = jax.nn.softmax(logits).reshape(logits_GSE.shape)
    first_K = members * jnp.arange(prototypes, dtype=jnp.int32)
    expert_GSK = jnp.argmax(logits, axis=-1).astype(jnp.int32) + first_K[None, None, :]
    weight_GSK, mask_GS = at_experts(probs_GSE, expert_GSK), tokens.mask_GS
    return plan_choices(
        *(expert_GSK, weight_GSK, mask_GS, num_experts, capacity(prototypes)),
        logits_GSE=logits_GSE,
        # Divided by Z, the probabilities of all prototypes together sum to 1, as do the shares.
        aux_loss=balance_loss(probs_GSE / prototypes, expert_GSK, mask_GS),
        ranked=False,
    )

"""BASE's gate: a balanced assignment of tokens to experts, S/E each, instead of a balance loss.

Source: BASE layers (arXiv 2103.16716) and their code in fairseq (base_layer.py).
"""

import math
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model.auction import auction
from m4.model.routing import Capacity, Routing, Tokens, at_experts, plan_choices
from m4.settings import Between, checked


@checked
def base(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    raises: Annotated[float, Between(1)] = 200.0,
    holding: Annotated[float, Between(0, 1)] = 0.2,
    max_rounds: Annotated[int, Between(1, 10**6)] = 400,
) -> Routing:
    """Training: the assignment with the highest total score and C = ceil(S/E) tokens an expert.

    Elsewhere each token goes to its best expert and none is dropped (C = S). The layer's capacity
    decides neither. The weight is the sigmoid of the token's score with its expert, and by it alone
    the router learns; there is no auxiliary loss. The router starts orthogonal.

    Where a token goes in training depends on all tokens of its group, later ones too, also in a
    decoder: so does the paper, which trains language models. Elsewhere a token is looked at alone.

    Args:
        tokens: see `Tokens`; the experts' centroids are the columns of `score("router")`.
        num_experts: E. capacity: not asked.
        raises, holding, max_rounds: see `m4.model.auction.auction`; raises = 50 and holding = 1 are
            fairseq's, quicker and less exact. The rounds are the metric `auction_rounds`.
    """
    logits_GSE = tokens.score("router", init="orthogonal")
    mask_GS = tokens.mask_GS
    G, S, E = logits_GSE.shape
    metrics = {}
    if tokens.train:
        C = math.ceil(S / E)
        # Padding, and what S lacks of C*E, score the same everywhere and no better than any token:
        # they take the places that are left.
        real_GS1 = mask_GS[..., None]
        lowest_G = jnp.min(jnp.where(real_GS1, logits_GSE, jnp.inf), axis=(1, 2))
        lowest_G11 = jnp.where(jnp.any(mask_GS, axis=1), lowest_G, 0.0)[:, None, None]
        scores_GSE = jnp.where(real_GS1, logits_GSE, lowest_G11)
        dummies_GSE = jnp.broadcast_to(lowest_G11, (G, C * E - S, E))
        expert_GS, rounds = auction(
            jnp.concatenate([scores_GSE, dummies_GSE], axis=1),
            raises=raises,
            holding=holding,
            max_rounds=max_rounds,
        )
        expert_GSK = expert_GS[:, :S, None]
        metrics["auction_rounds"] = rounds.astype(jnp.float32)
    else:
        C = S
        expert_GSK = jnp.argmax(logits_GSE, axis=-1)[..., None]
    weight_GSK = jax.nn.sigmoid(at_experts(logits_GSE, expert_GSK))
    return plan_choices(expert_GSK, weight_GSK, mask_GS, num_experts, C, metrics=metrics)

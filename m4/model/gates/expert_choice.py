"""Expert choice: each expert takes its best tokens, instead of tokens taking their best experts.

Source: Zhou et al. 2022 (arXiv 2202.09368), section 3.2; Lingvo, gshard_layers.py,
TokenShufflingOnlogitsV2, agrees (slots in token order, padding left out).
"""

import jax
import jax.numpy as jnp
import numpy as np

from m4.model import routing
from m4.model.routing import Capacity, Routing, Tokens
from m4.settings import checked


@checked
def expert_choice(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    capacity_factor: routing.CapacityFactor = 2.0,
) -> Routing:
    """Gives each expert the C = ceil(S * capacity_factor / E) tokens with the largest p, at most S.

    The weight is p, the softmax over experts, not renormalised. A token may get any number of
    experts, 0 to E; choice k of the plan is expert k. The load is even by construction, so that
    there is no auxiliary loss.

    Outside training, an expert takes only ceil(real tokens * capacity_factor / E) of a group. There
    a row is a group, so that its result does not depend on its padding. (With a
    `MoeLayer.eval_capacity_factor`, groups mix rows, and results depend on other rows.)

    Args:
        capacity_factor: Mean number of experts per token. In training, as in Lingvo, padding counts
            among the tokens, so that real ones get more.
    """
    routing.refuse_causal(tokens, "MoeLayer.gate", "expert_choice")
    logits_GSE, mask_GS = tokens.score("router"), tokens.mask_GS
    S = logits_GSE.shape[1]
    # A table for each number of real tokens, which must have the same number of slots in every
    # program. A small number is subtracted because a factor such as 8/3 may be rounded up.
    count = np.arange(S + 1)
    shares = np.ceil(count * capacity_factor / num_experts - 1e-6)
    slots_of = np.minimum(shares, count).astype(np.int32)
    C = max(int(slots_of[S]), 1)
    limit_G = jnp.full(logits_GSE.shape[:1], C)
    if not tokens.train:
        limit_G = jnp.asarray(slots_of)[jnp.sum(mask_GS, axis=1)]
    probs_GSE = jax.nn.softmax(logits_GSE)
    likes_GES = jnp.where(mask_GS[:, None], jnp.swapaxes(probs_GSE, 1, 2), -1.0)
    # `top_k` returns the largest first; ties go to the earlier token.
    _, token_GEC = jax.lax.top_k(jax.lax.stop_gradient(likes_GES), C)
    within_GEC = jnp.arange(C)[None, None] < limit_G[:, None, None]
    within_GEC = jnp.broadcast_to(within_GEC, token_GEC.shape)
    mark = jax.vmap(jax.vmap(lambda token_C, taken_C: jnp.zeros(S, bool).at[token_C].set(taken_C)))
    taken_GSE = jnp.swapaxes(mark(token_GEC, within_GEC), 1, 2) & mask_GS[..., None]
    position_GSE = jnp.cumsum(taken_GSE, axis=1, dtype=jnp.int32) - 1
    position_GSE = jnp.where(taken_GSE, position_GSE, -1)
    plan = None, position_GSE, probs_GSE, mask_GS, num_experts, C
    return routing.make_routing(*plan, logits_GSE=logits_GSE)

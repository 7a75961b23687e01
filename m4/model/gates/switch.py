"""Switch Transformer's gate: the best expert, weighted by its probability.

Source: Switch Transformer (arXiv 2101.03961), section 2.2, and Mesh TensorFlow's _switch_gating
(moe.py 1180-1300); the z-loss is ST-MoE's (arXiv 2202.08906, equation 5).
"""

from m4.model.gates.topk import route
from m4.model.routing import Capacity, Routing, Tokens
from m4.settings import Rate, checked


@checked
def switch(tokens: Tokens, num_experts: int, capacity: Capacity, *, jitter: Rate = 1e-2) -> Routing:
    """Routes each token to its best expert e (ties: the lowest index) with weight p_e.

    The weight is not normalised, because the router learns only through p_e. The auxiliary loss is
    that of `topk`: f is the share of tokens whose best expert is e, before capacity.

    Args:
        jitter: In training, the router's float32 copy of the tokens is multiplied by
            U(1 - jitter, 1 + jitter).
    """
    noisy = tokens.train and tokens.rng is not None
    logits_GSE = tokens.score("router", jitter=jitter if noisy else 0.0, key=tokens.rng)
    return route(logits_GSE, tokens.mask_GS, num_experts, capacity, 1)

"""Noisy top-k: noise of learned size explores other experts, and two losses keep the balance.

Source: Shazeer et al. 2017 (arXiv 1701.06538), equations 3-11, as in tensor2tensor
(expert_utils.py: noisy_top_k_gating, _prob_in_top_k, cv_squared).
"""

import math
from typing import Annotated

import jax
import jax.numpy as jnp

from m4.model.product import full_product
from m4.model.routing import Array, Capacity, Routing, Tokens, check_choices, plan_choices, top_k
from m4.settings import Between, Factor, Size, checked


@checked
def noisy_topk(
    tokens: Tokens,
    num_experts: int,
    capacity: Capacity,
    *,
    choices: Size = 2,
    importance: Factor = 1.0,
    load: Factor = 1.0,
    noise_epsilon: Annotated[float, Between(0, 1e6, above=True)] = 1e-2,
) -> Routing:
    """Routes each token to the k best of H = x Wg + N(0, 1) sd, sd = softplus(x Wn) + epsilon.

    The weights are the softmax over the k kept entries of H; ties go to the lowest index. Outside
    training or without random numbers, H = x Wg. Both matrices start as zeros: at first only noise
    decides, and an untrained gate without noise sends each token to experts 0 to k - 1.

    The auxiliary loss is importance * CV^2(sum of weights) + load * CV^2(load) by expert, before
    capacity, over all real tokens of the layer (ignoring groups). It is 0 when balanced, unlike
    that of other gates. The load is smooth: each token counts with the probability that the expert
    is among its k best when its noise is drawn again. Without noise or for k = E, it is a plain
    count. (tensor2tensor multiplies the two by 1e-2, as `Training.aux_loss_factor` does here; the
    paper by 0.1.) The z-loss is that of x Wg, without noise.

    Args:
        choices: Number of experts per token, k.
        importance: Factor of the loss on the sums of weights.
        load: Factor of the loss on the load; 0 leaves the plain importance loss.
        noise_epsilon: Smallest standard deviation of the noise.
    """
    check_choices("noisy_topk.choices", choices, num_experts)
    clean_GSE = tokens.score("router", init="zeros")
    # Also made without noise, so that the matrix exists whenever the model is initialised.
    raw_GSE = tokens.score("noise", init="zeros")
    noisy_GSE, sd_GSE = clean_GSE, jax.nn.softplus(raw_GSE) + noise_epsilon
    if tokens.train and tokens.rng is not None:
        noisy_GSE = clean_GSE + sd_GSE * jax.random.normal(tokens.rng, clean_GSE.shape)
    best_GSK, expert_GSK = top_k(noisy_GSE, min(choices + 1, num_experts))
    expert_GSK = expert_GSK[..., :choices]
    weight_GSK = jax.nn.softmax(best_GSK[..., :choices])
    one_GSKE = jax.nn.one_hot(expert_GSK, num_experts, dtype=jnp.float32)
    weight_GSE = full_product("GSK,GSKE->GSE", weight_GSK, one_GSKE)
    if noisy_GSE is clean_GSE or choices == num_experts:
        load_GSE = (weight_GSE > 0).astype(jnp.float32)
    else:
        # Each expert's chance to be among the k best if its noise were drawn again (eq. 9). It must
        # beat the k-th best of the others: the (k+1)-th of all if it is in, else the k-th.
        last_in_GS1, first_out_GS1 = best_GSK[..., choices - 1 : choices], best_GSK[..., choices:]
        threshold_GSE = jnp.where(noisy_GSE > first_out_GS1, first_out_GS1, last_in_GS1)
        above_GSE = (clean_GSE - threshold_GSE) / (math.sqrt(2.0) * sd_GSE)
        load_GSE = 0.5 * (1.0 + jax.lax.erf(above_GSE))
    real_GS1 = tokens.mask_GS[..., None]
    importance_E = jnp.sum(weight_GSE * real_GS1, axis=(0, 1))
    load_E = jnp.sum(load_GSE * real_GS1, axis=(0, 1))
    return plan_choices(
        *(expert_GSK, weight_GSK, tokens.mask_GS, num_experts, capacity(choices)),
        logits_GSE=clean_GSE,
        aux_loss=importance * cv_squared(importance_E) + load * cv_squared(load_E),
    )


def cv_squared(x_E: Array) -> Array:
    """Returns the squared coefficient of variation, population variance / mean^2; 0 for zeros."""
    return jnp.var(x_E) / (jnp.square(jnp.mean(x_E)) + 1e-10)

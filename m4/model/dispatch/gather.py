"""Dispatch and combine by gathers in both directions: no one-hot masks, no scatter of vectors.

A plan is a partial permutation. Its inverse (which token sits in seat (e, c)?) is made once with
a scatter of integers; then moving tokens to seats, moving results back, and both gradients are
gathers. XLA would differentiate a gather into a scatter-add of vectors, which is slow everywhere:
hence the custom gradients.
"""

import jax
import jax.numpy as jnp

from m4.model.experts import Experts
from m4.model.layers import constrain
from m4.model.routing import Array, Routing


def gather(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """The same result as `einsum`: y_GSM = sum_K weight * expert(x)."""
    groups, group_tokens, width = x_GSM.shape
    E, C, K = routing.num_experts, routing.capacity, routing.expert_GSK.shape[-1]
    # Seats are numbered e*C + c; seat E*C and choice S*K are the places of what has none.
    flat_GSK = jnp.where(routing.seat_GSK >= 0, routing.expert_GSK * C + routing.seat_GSK, E * C)
    flat_GJ = flat_GSK.reshape(groups, group_tokens * K)
    choice_J = jnp.arange(group_tokens * K, dtype=jnp.int32)
    owner_GP = jnp.full((groups, E * C + 1), group_tokens * K, jnp.int32)
    owner_GP = jax.vmap(lambda owner, flat: owner.at[flat].set(choice_J))(owner_GP, flat_GJ)
    owner_GP = owner_GP[:, : E * C]  # the last one collected those without a seat

    sent_GPM = _send(x_GSM, owner_GP, flat_GJ)
    sent_EGCM = sent_GPM.reshape(groups, E, C, width).transpose(1, 0, 2, 3)
    sent_EGCM = constrain(sent_EGCM, (None, "batch", None, "embed"))
    sent_EGCM = constrain(sent_EGCM, ("expert", "expert_group", None, "embed"))
    done_EGCM = experts(sent_EGCM)
    done_EGCM = constrain(done_EGCM, ("expert", "expert_group", None, "embed"))
    done_EGCM = constrain(done_EGCM, (None, "batch", None, "embed"))
    done_GPM = done_EGCM.transpose(1, 0, 2, 3).reshape(groups, E * C, width)
    back_GJM = _back(done_GPM, owner_GP, flat_GJ)
    back_GSKM = back_GJM.reshape(groups, group_tokens, K, width)
    return jnp.einsum("GSKM,GSK->GSM", back_GSKM, routing.weight_GSK.astype(x_GSM.dtype))


def _rows(x_GNM: Array, index_GP: Array) -> Array:
    """x[g, index[g, p], :], and 0 where the index is N (one past the end)."""
    return jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=0))(x_GNM, index_GP)


@jax.custom_vjp
def _send(x_GSM: Array, owner_GP: Array, flat_GJ: Array) -> Array:
    """Token of each seat; 0 in empty seats."""
    choices = flat_GJ.shape[1] // x_GSM.shape[1]
    # Choice number S*K (nobody) becomes token number S: one past the end.
    return _rows(x_GSM, owner_GP // choices)


def _send_forward(x_GSM: Array, owner_GP: Array, flat_GJ: Array):
    return _send(x_GSM, owner_GP, flat_GJ), (flat_GJ, x_GSM.shape[1])


def _send_backward(saved, d_GPM: Array):
    flat_GJ, group_tokens = saved
    d_GJM = _rows(d_GPM, flat_GJ)
    choices = flat_GJ.shape[1] // group_tokens
    d_GSM = d_GJM.reshape(d_GJM.shape[0], group_tokens, choices, -1).sum(axis=2)
    return d_GSM, None, None


_send.defvjp(_send_forward, _send_backward)


@jax.custom_vjp
def _back(done_GPM: Array, owner_GP: Array, flat_GJ: Array) -> Array:
    """Result of each choice; 0 for a choice without a seat."""
    return _rows(done_GPM, flat_GJ)


def _back_forward(done_GPM: Array, owner_GP: Array, flat_GJ: Array):
    return _back(done_GPM, owner_GP, flat_GJ), owner_GP


def _back_backward(owner_GP: Array, d_GJM: Array):
    return _rows(d_GJM, owner_GP), None, None


_back.defvjp(_back_forward, _back_backward)

"""Transport by gathers in both directions, without one-hot masks and without a sort.

A plan is a partial permutation. A scatter of integers makes its inverse once (which choice has slot
(e, c)?). Then moving tokens to slots, moving results back, and both gradients are gathers. Custom
gradients are needed because XLA would differentiate a gather into a scatter-add of vectors, which
is slow everywhere.

With more choices than slots (expert choice: K = E), rows of slots are moved instead of rows of
choices: results are summed at their tokens, E*C rows instead of S*K.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m4.model.dispatch import by_annotation
from m4.model.feed_forward import Experts
from m4.model.routing import Array, Routing
from m4.settings import configurable


@configurable
def gather(x_GSM: Array, routing: Routing, experts: Experts) -> Array:
    """Carries tokens by gathers; the default, because it was the fastest in measurements."""
    slots = slots_of(
        routing.expert_GSK, routing.position_GSK, routing.num_experts, routing.capacity
    )
    sent_EGCM = by_expert(send(x_GSM, slots), routing.num_experts)
    done_EGCM = by_annotation(sent_EGCM, experts)
    return combine(by_group(done_EGCM), routing.weight_GSK, slots)


class Slots(NamedTuple):
    """A plan and its inverse.

    The J = S*K choices of a group are numbered s*K + k, its P = E*C slots e*C + c.
    """

    owner_GP: Array  # The choice in each slot; J in an empty slot.
    slot_GJ: Array  # The slot of each choice; P for a choice without a slot.


def slots_of(expert_GSK: Array, position_GSK: Array, num_experts: int, capacity: int) -> Slots:
    """Returns a plan as numbered slots, int32."""
    G, S, K = expert_GSK.shape
    J, P = S * K, num_experts * capacity
    flat_GSK = jnp.where(position_GSK >= 0, expert_GSK * capacity + position_GSK, P)
    slot_GJ = flat_GSK.reshape(G, J)
    choice_J = jnp.arange(J, dtype=jnp.int32)
    owner_GP = jnp.full((G, P + 1), J, jnp.int32)
    owner_GP = jax.vmap(lambda owner, slot: owner.at[slot].set(choice_J))(owner_GP, slot_GJ)
    return Slots(owner_GP[:, :P], slot_GJ)  # choices without a slot are at index P


def by_expert(x_GPM: Array, num_experts: int) -> Array:
    """Reorders rows of slots [G, E*C, M] to [E, G, C, M]."""
    G, P, M = x_GPM.shape
    return x_GPM.reshape(G, num_experts, P // num_experts, M).transpose(1, 0, 2, 3)


def by_group(x_EGCM: Array) -> Array:
    """Reorders [E, G, C, M] to rows of slots [G, E*C, M]."""
    E, G, C, M = x_EGCM.shape
    return x_EGCM.transpose(1, 0, 2, 3).reshape(G, E * C, M)


@jax.custom_vjp
def send(x_GSM: Array, slots: Slots) -> Array:
    """Returns the token of each slot, [G, P, M]; 0 in empty slots."""
    choices = slots.slot_GJ.shape[1] // x_GSM.shape[1]
    # Index S*K, no choice, becomes token S: one past the end.
    return _rows(x_GSM, slots.owner_GP // choices)


def _send_backward(saved, d_GPM: Array):
    slots, group_tokens = saved
    choices = slots.slot_GJ.shape[1] // group_tokens
    if _more_choices(slots):
        return _sums(d_GPM, slots.owner_GP // choices, group_tokens), None
    d_GJM = _rows(d_GPM, slots.slot_GJ)
    return d_GJM.reshape(d_GJM.shape[0], group_tokens, choices, -1).sum(axis=2), None


send.defvjp(lambda x_GSM, slots: (send(x_GSM, slots), (slots, x_GSM.shape[1])), _send_backward)


@jax.custom_vjp
def fetch(done_GPM: Array, slots: Slots) -> Array:
    """Returns the row of each choice, [G, J, M]; 0 for a choice without a slot."""
    return _rows(done_GPM, slots.slot_GJ)


fetch.defvjp(
    lambda done_GPM, slots: (fetch(done_GPM, slots), slots.owner_GP),
    lambda owner_GP, d_GJM: (_rows(d_GJM, owner_GP), None),
)


def combine(done_GPM: Array, weight_GSK: Array, slots: Slots) -> Array:
    """Returns y_GSM, the sum of weight * the slot's row over a token's choices with a slot."""
    G, S, K = weight_GSK.shape
    if _more_choices(slots):
        return _add(done_GPM, weight_GSK, slots)
    back_GSKM = fetch(done_GPM, slots).reshape(G, S, K, done_GPM.shape[-1])
    return jnp.einsum("GSKM,GSK->GSM", back_GSKM, weight_GSK.astype(done_GPM.dtype))


@jax.custom_vjp
def _add(done_GPM: Array, weight_GSK: Array, slots: Slots) -> Array:
    _, S, K = weight_GSK.shape
    return _sums(_weighted(done_GPM, weight_GSK, slots), slots.owner_GP // K, S)


def _add_backward(saved, d_GSM: Array):
    done_GPM, weight_GSK, slots = saved
    d_GPM = _rows(d_GSM, slots.owner_GP // weight_GSK.shape[-1])
    d_weight_GP = jnp.einsum(
        "GPM,GPM->GP", d_GPM, done_GPM, preferred_element_type=weight_GSK.dtype
    )
    d_weight_GSK = _rows(d_weight_GP, slots.slot_GJ).reshape(weight_GSK.shape)
    return _weighted(d_GPM, weight_GSK, slots), d_weight_GSK, None


_add.defvjp(lambda *given: (_add(*given), given), _add_backward)


def _more_choices(slots: Slots) -> bool:
    return slots.slot_GJ.shape[1] > slots.owner_GP.shape[1]


def _weighted(x_GPM: Array, weight_GSK: Array, slots: Slots) -> Array:
    """Multiplies the rows of slots by the weights of their choices."""
    weight_GP = _rows(weight_GSK.reshape(weight_GSK.shape[0], -1), slots.owner_GP)
    return x_GPM * weight_GP[..., None].astype(x_GPM.dtype)


def _rows(x_GNM: Array, index_GP: Array) -> Array:
    """Returns x[g, index[g, p], ...], or 0 where the index is N, one past the end."""
    return jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=0))(x_GNM, index_GP)


def _sums(x_GPM: Array, index_GP: Array, size: int) -> Array:
    """Sums rows with equal indices in float32, [G, size, M], without those of index `size`.

    On a GPU, the order of additions is not fixed.
    """

    def one(x_PM: Array, index_P: Array) -> Array:
        zeros = jnp.zeros((size, x_PM.shape[-1]), jnp.float32)
        return zeros.at[index_P].add(x_PM.astype(jnp.float32), mode="drop")

    return jax.vmap(one)(x_GPM, index_GP).astype(x_GPM.dtype)

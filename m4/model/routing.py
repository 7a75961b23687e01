"""What a gate decides: which expert, which seat, which weight; how many seats there are.

A gate plans and does not carry: it returns a `Routing`, and a transport in `m4.model.dispatch`
moves the tokens. All of it is float32 and int32, whatever the model's type: a cumulative sum in
bfloat16 stops counting at 256.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array


@struct.dataclass
class Routing:
    """The plan for one layer's tokens.

    Attributes:
        expert_GSK: the expert of each choice, int32 in [0, E).
        seat_GSK: its place in that expert's buffer of its group, int32 in [0, C); -1: no seat.
        weight_GSK: what the expert's output is multiplied by, float32 in [0, 1]; 0 without a seat.
        num_experts: E. capacity: C, seats a (group, expert).
        aux_loss: scalar; 1 when the load is balanced.
        z_loss: scalar, mean of logsumexp(logits)^2 over real tokens.
        metrics: scalars (and `load_E`) to look at; averaged over layers by the trainer.
    """

    expert_GSK: Array
    seat_GSK: Array
    weight_GSK: Array
    aux_loss: Array
    z_loss: Array
    metrics: Mapping[str, Array]
    num_experts: int = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)


@struct.dataclass
class Tokens:
    """What a gate may look at.

    Attributes:
        score: name -> logits_GSE float32, a router matrix made on demand.
        mask_GS: True for real tokens; padding is given, never guessed.
        ids_GS: token ids (hash routing). rng: a key, or None for deterministic routing.
        train: whether this is a training step.
    """

    score: Callable[[str], Array] = struct.field(pytree_node=False)
    mask_GS: Array
    ids_GS: Array | None = None
    rng: Array | None = None
    train: bool = struct.field(pytree_node=False, default=False)


class Gate(Protocol):
    """gate(tokens, num_experts, capacity) -> Routing. One file a gate in `m4.model.gates`."""

    def __call__(self, tokens: Tokens, num_experts: int, capacity: int) -> Routing: ...


def expert_capacity(group_tokens: int, num_experts: int, factor: float, choices: int = 2) -> int:
    """Seats a (group, expert): factor * choices * S / E, at least 4, rounded up to a multiple of 4.

    factor=1 with two choices is the paper's 2S/E (arXiv 2006.16668, section 2.2); the rounding is
    Lingvo's (gshard_layers.py 2062-2077). Never more than S: a token takes one seat an expert.
    """
    seats = max(int(group_tokens * choices * factor / num_experts), 4)
    return min(group_tokens, math.ceil(seats / 4) * 4)


def take_seats(
    expert_GS: Array, wants_GS: Array, taken_GE: Array, num_experts: int
) -> tuple[Array, Array]:
    """Hands out seats in token order, after those already taken.

    Returns position_GS (the seat each wanting token would get, also beyond the capacity) and the
    new taken_GE (counting everyone who wanted). Algorithm 1 lines 9-12 without the loop.
    """
    wants_GSE = jax.nn.one_hot(expert_GS, num_experts, dtype=jnp.int32) * wants_GS[..., None]
    before_GSE = jnp.cumsum(wants_GSE, axis=1) - wants_GSE + taken_GE[:, None, :]
    position_GS = jnp.take_along_axis(before_GSE, expert_GS[..., None], axis=2)[..., 0]
    return position_GS, taken_GE + wants_GSE.sum(axis=1)


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean of x where the mask is True; 0 where it is nowhere True."""
    mask = mask.astype(jnp.float32)
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)

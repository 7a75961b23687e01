"""Gate of BASE layers: a balanced assignment of S/E tokens to each expert, without balance loss.

Source: BASE layers (Lewis et al. 2021, arXiv 2103.16716) and their code in fairseq: base_layer.py,
and the auction in balanced_assignment.cpp, where experts bid for their best S/E tokens until every
token has a bidder (Bertsekas' algorithm).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m4.model.routing import Array, Capacity, Routing, Tokens, at_experts, plan_choices
from m4.settings import checked


@checked
def base(tokens: Tokens, num_experts: int, capacity: Capacity) -> Routing:
    """Assigns in training an equal share of a group's real tokens to each expert, by total score.

    Outside training, each token goes to its best expert and none is dropped (C = S). The layer's
    capacity is ignored in both cases. The weight is the sigmoid of the token's score with its
    expert; the router learns only through it, as there is no auxiliary loss. The experts' centroids
    are the columns of the router matrix, which starts orthogonal.

    In training, a token's expert depends on all tokens of its group, including later ones and in
    decoders, as in the paper, which trains language models. Elsewhere it depends only on the token.
    The metric `auction_rounds` is the number of rounds that `auction` took.
    """
    logits_GSE = tokens.score("router", init="orthogonal")
    mask_GS = tokens.mask_GS
    _, S, E = logits_GSE.shape
    metrics = {}
    if tokens.train:
        C = math.ceil(S / E)
        short = ((0, 0), (0, C * E - S))  # padding to a multiple of the experts
        scores_GSE = jnp.pad(logits_GSE, (*short, (0, 0)))
        expert_GS, rounds = auction(scores_GSE, jnp.pad(mask_GS, short))
        expert_GSK = expert_GS[:, :S, None]
        metrics["auction_rounds"] = rounds.astype(jnp.float32)
    else:
        C = S
        expert_GSK = jnp.argmax(logits_GSE, axis=-1)[..., None]
    weight_GSK = jax.nn.sigmoid(at_experts(logits_GSE, expert_GSK))
    return plan_choices(expert_GSK, weight_GSK, mask_GS, num_experts, C, metrics=metrics)


# The smallest raise of a bid is the range of a group's scores divided by _RAISES. Each round, a
# token that stays with its holder costs _HOLDING of that more, so that tokens without an expert
# become cheaper than others; 0 is exact to S raises, and slow. After _MOST_ROUNDS, such tokens go
# to free places. (fairseq: 50 and 1; after 100 rounds with rising prices and without holders.)
_RAISES, _HOLDING, _MOST_ROUNDS = 200.0, 0.2, 400
_NEVER = -1e3  # value of padding that belongs to another expert


class _Auction(NamedTuple):
    round: Array  # rounds so far
    cost_S: Array  # price of each token so far
    bidder_S: Array  # the expert that holds each token, or -1


def auction(scores_GSE: Array, real_GS: Array) -> tuple[Array, Array]:
    """Assigns exactly S/E tokens of each group to each expert; S is a multiple of E.

    Experts get padding in turn, without bids: their numbers of real tokens differ by at most one.

    The assignment is a deterministic function of the scores, without a gradient. Its total score is
    nearly optimal: for normal random scores, at most 0.15% of the distance to the mean assignment
    was missing after 10 to 90 rounds (1.7% after 14 with fairseq's constants).

    Returns:
        expert_GS, int32, and the number of rounds of the slowest group, an int32 scalar.
    """
    expert_GS, rounds_G = jax.vmap(_assign)(jax.lax.stop_gradient(scores_GSE), real_GS)
    return expert_GS, jnp.max(rounds_G)


def _assign(scores_SE: Array, real_S: Array) -> tuple[Array, Array]:
    S, E = scores_SE.shape
    if E == 1:
        return jnp.zeros(S, jnp.int32), jnp.zeros((), jnp.int32)
    share, least = S // E, 1.0 / _RAISES
    # As all tokens are assigned, the mean score of a token or an expert does not matter and is
    # subtracted, so that the range is that of what does matter. Scores are then scaled to [0, 1],
    # so that raises do not vanish next to large scores.
    real_S1, count = real_S[:, None], jnp.maximum(jnp.sum(real_S), 1)
    scores_SE = scores_SE - jnp.mean(scores_SE, axis=1, keepdims=True)
    sums_1E = jnp.sum(jnp.where(real_S1, scores_SE, 0.0), axis=0, keepdims=True)
    scores_SE = jnp.where(real_S1, scores_SE - sums_1E / count, 0.0)
    lowest, highest = jnp.min(scores_SE), jnp.max(scores_SE)
    scores_ES = (scores_SE.T - lowest) / jnp.where(highest > lowest, highest - lowest, 1.0)
    expert_E1 = jnp.arange(E)[:, None]
    owner_S = jnp.where(real_S, -1, jnp.cumsum(~real_S) % E)
    # Expert e breaks ties from token e*S/E on. Otherwise, all would bid for the same tokens if all
    # scores are equal (padding), and only one expert per round would get its share.
    first_E1 = expert_E1 * share
    turned_ES = (jnp.arange(S)[None] + first_E1) % S

    def go_on(state: _Auction) -> Array:
        return jnp.any(state.bidder_S < 0) & (state.round < _MOST_ROUNDS)

    def one_round(state: _Auction) -> _Auction:
        held_ES = state.bidder_S[None] == expert_E1
        # A holder keeps its tokens among its best, whatever they cost.
        value_ES = jnp.where(held_ES, 1.0, scores_ES - state.cost_S[None])
        value_ES = jnp.where((owner_S >= 0)[None] & ~held_ES, _NEVER, value_ES)
        # Without the barrier, XLA turns the two slices below into slices of a full sort, which its
        # CPU compiler does not recognise as a top-k and which is ten times slower.
        best_EK, place_EK = jax.lax.optimization_barrier(
            jax.lax.top_k(jnp.take_along_axis(value_ES, turned_ES, axis=1), share + 1)
        )
        token_EK = (place_EK[:, :share] + first_E1) % S
        # The value of a token above the first one that the expert would not get.
        bid_EK = best_EK[:, :share] - best_EK[:, share:] + least
        bids_ES = jnp.zeros_like(scores_ES).at[expert_E1, token_EK].set(bid_EK)
        bids_ES = jnp.where(held_ES, least, bids_ES)
        high_S = jnp.max(bids_ES, axis=0)
        bidder_S = jnp.where(high_S > 0, jnp.argmax(bids_ES, axis=0), -1).astype(jnp.int32)
        paid_S = jnp.where(bidder_S == state.bidder_S, _HOLDING * high_S, high_S)
        return _Auction(state.round + 1, state.cost_S + paid_S, bidder_S)

    start = _Auction(jnp.zeros((), jnp.int32), jnp.zeros(S), owner_S.astype(jnp.int32))
    end = jax.lax.while_loop(go_on, one_round, start)
    return _fill(end.bidder_S, E), end.round


def _fill(expert_S: Array, num_experts: int) -> Array:
    """Gives free places to tokens without an expert (-1) or beyond an expert's share."""
    share = expert_S.shape[0] // num_experts
    of_SE = jax.nn.one_hot(expert_S, num_experts, dtype=jnp.int32)
    before_S = jnp.sum((jnp.cumsum(of_SE, axis=0) - of_SE) * of_SE, axis=1)
    stays_S = (expert_S >= 0) & (before_S < share)
    free_E = share - jnp.sum(of_SE * stays_S[:, None], axis=0)
    number_S = jnp.cumsum(~stays_S) - 1  # the n-th token without a place gets the n-th free one
    place_S = jnp.searchsorted(jnp.cumsum(free_E), number_S, side="right").astype(jnp.int32)
    return jnp.where(stays_S, expert_S, place_S)

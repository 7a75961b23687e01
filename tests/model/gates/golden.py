"""The golden cases, plans as masks, and slots handed out by loops, for tests of gates."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.model.routing import Capacity, Gate, Routing, Tokens

GOLDEN = Path(__file__).parents[2] / "testdata" / "gates"
CASES = ("tiny", "small", "e2", "overflow", "pad", "ties")

# Four tokens, three experts; nothing ties.
PROBS = [[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1], [0.2, 0.5, 0.3]]]


@functools.cache
def read(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


@functools.cache  # one function a number: a program that was compiled with it is found again
def slots(number: int) -> Capacity:
    """Returns a capacity of this many slots, however many choices there are."""
    return lambda choices: number


def tokens_of(logits_GSE: Any, mask_GS: Any = None, noise_GSE: Any = 0.0, **about: Any) -> Tokens:
    """Returns tokens whose router gives these logits; without a mask, all are real."""
    logits_GSE = jnp.asarray(logits_GSE, jnp.float32)
    noise_GSE = jnp.asarray(np.broadcast_to(noise_GSE, logits_GSE.shape), jnp.float32)
    if mask_GS is None:
        mask_GS = np.ones(logits_GSE.shape[:2], bool)
    by_name = {"router": logits_GSE, "noise": noise_GSE}
    return Tokens(
        score=lambda name, **_: by_name[name], mask_GS=jnp.asarray(mask_GS, bool), **about
    )


def at_once(gate: Gate, tokens: Tokens, E: int, capacity: Capacity, **options: Any) -> Routing:
    """Runs gate(tokens, E, capacity, **options) as one program, for tokens without a table.

    Operation by operation each is compiled on its own, again for every shape: that takes longer.
    The plan's arrays are numpy's, whose operations are not compiled.
    """
    return all_at_once(gate, tokens, E, capacity, [options])[0]


def all_at_once(
    gate: Gate, tokens: Tokens, E: int, capacity: Capacity, variants: Sequence[dict[str, Any]]
) -> list[Routing]:
    """Makes the plans of several options in one program, as they share most operations."""
    scores = {name: tokens.score(name) for name in ("router", "noise")}
    # A program is found again by what is static, and functions are equal to themselves alone.
    bare = replace(tokens, score=_no_score, table=None)
    given = tuple(tuple(sorted(options.items())) for options in variants)
    return jax.device_get(_planned(gate, E, capacity, given, bare, scores))


def _no_score(name: str, **_: Any) -> jax.Array:
    raise AssertionError(name)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _planned(
    gate: Gate,
    E: int,
    capacity: Capacity,
    variants: tuple[tuple[tuple[str, Any], ...], ...],
    tokens: Tokens,
    scores: dict[str, jax.Array],
) -> list[Routing]:
    scored = replace(tokens, score=lambda name, **_: scores[name])
    return [gate(scored, E, capacity, **dict(options)) for options in variants]


def golden_tokens(inputs: dict[str, np.ndarray], case: str) -> tuple[Tokens, int, int]:
    """Returns (tokens, E, C) of a case."""
    logits_GSE = inputs[f"{case}/logits"]
    tokens = tokens_of(logits_GSE, inputs[f"{case}/paddings"] == 0)
    return tokens, logits_GSE.shape[-1], int(inputs[f"{case}/capacity"])


def groups_over_real_groups(case: str) -> float:
    """Returns all groups / real groups, as golden means count groups of padding with loss 0."""
    real_G = (read("inputs")[f"{case}/paddings"] == 0).any(axis=1)
    return len(real_G) / real_G.sum()


def masks(routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Returns (combine_GSEC, dispatch_GSEC) of a plan, choice by choice."""
    expert_GSK, position_GSK, weight_GSK = (
        np.asarray(x) for x in (routing.expert_GSK, routing.position_GSK, routing.weight_GSK)
    )
    shape = (*position_GSK.shape[:2], routing.num_experts, routing.capacity)
    combine_GSEC, dispatch_GSEC = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for g, s, k in zip(*np.nonzero(position_GSK >= 0), strict=True):
        place = g, s, expert_GSK[g, s, k], position_GSK[g, s, k]
        combine_GSEC[place] += weight_GSK[g, s, k]
        dispatch_GSEC[place] = True
    return combine_GSEC, dispatch_GSEC


def assert_same_plan(routing: Routing, combine, dispatch, where: str = "slot") -> None:
    """Asserts that masks are equal, and weights to 2e-6."""
    combine_GSEC, dispatch_GSEC = masks(routing)
    got = dispatch_GSEC if where == "slot" else combine_GSEC != 0
    np.testing.assert_array_equal(got, dispatch)
    np.testing.assert_allclose(combine_GSEC, combine, atol=2e-6, rtol=0)


def random_case(seed: int, G: int, S: int, E: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (logits_GSE, mask_GS) with scattered padding, which fills the last group."""
    rng = np.random.default_rng(seed)
    mask = rng.random((G, S)) < 0.8
    mask[-1] = False
    return rng.normal(0, 2, (G, S, E)).astype(np.float32), mask


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis, in float64."""
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def best(scores_GSE: np.ndarray, choices: int) -> np.ndarray:
    """Returns the indices of the largest, with ties to the lowest index."""
    return np.argsort(-scores_GSE, axis=-1, kind="stable")[..., :choices]


def slopes(function: Callable[[np.ndarray], float], x: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Returns the function's gradient at x, by central differences."""
    steps = h * np.eye(x.size).reshape(-1, *x.shape)
    found = [function(x + step) - function(x - step) for step in steps]
    return np.array(found).reshape(x.shape) / (2 * h)


def slots_by_loops(
    expert_GSK: Any, mask_GS: Any, capacity: int, *, priority: Any = None
) -> np.ndarray:
    """Returns position_GSK by a loop over choices, in which experts also count dropped ones."""
    expert_GSK, mask_GS = np.asarray(expert_GSK), np.asarray(mask_GS)
    G, S, K = expert_GSK.shape
    position_GSK = np.full((G, S, K), -1)
    for g in range(G):
        order = sorted(range(S), key=lambda s: 0 if priority is None else -priority[g, s])
        taken: dict[int, int] = {}
        for k, s in itertools.product(range(K), order):
            if not mask_GS[g, s]:
                continue
            e = int(expert_GSK[g, s, k])
            if taken.get(e, 0) < capacity:
                position_GSK[g, s, k] = taken.get(e, 0)
            taken[e] = taken.get(e, 0) + 1
    return position_GSK


def balance_by_loops(probs_GSE: np.ndarray, expert_GSK: Any, mask_GS: np.ndarray) -> float:
    """Returns E * sum_e f_e P_e over a group's real tokens, averaged over groups with any."""
    E, losses = probs_GSE.shape[-1], []
    for probs, expert, mask in zip(probs_GSE, np.asarray(expert_GSK), mask_GS, strict=True):
        if mask.any():
            f = np.bincount(expert[mask].ravel(), minlength=E) / expert[mask].size
            losses.append(E * f @ probs[mask].mean(axis=0))
    return float(np.mean(losses))

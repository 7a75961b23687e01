"""A second implementation of beam search: Python lists of hypotheses, float64, one row."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

Tokens = tuple[int, ...]


def penalty(alpha: float, length: int) -> float:
    return ((5 + length) / 6) ** alpha


def search_over_lists(
    logp: Callable[[Tokens], Sequence[float]],
    prefix: Sequence[int],
    beams: int,
    alpha: float,
    length: int,
    eos: int = 1,
) -> tuple[list[list[int]], list[float], float]:
    """Returns (sequences, scores, smallest gap between compared scores), best first.

    logp: tokens so far -> log-probabilities over the vocabulary; -inf: it may not come.
    """
    live: list[tuple[float, Tokens]] = [(0.0, ())]
    finished: list[tuple[float, Tokens]] = []
    gap = math.inf
    for step in range(length):
        if not live:
            break
        if len(finished) == beams:
            bound = live[0][0] / penalty(alpha, length + 1)
            gap = min(gap, abs(finished[-1][0] - bound))
            if finished[-1][0] > bound:
                break
        if step < len(prefix):
            live = [(0.0, (*live[0][1], prefix[step]))]
            continue
        candidates = [
            (score + each, (*tokens, token))
            for score, tokens in live
            for token, each in enumerate(logp(tokens))
            if each > -math.inf
        ]
        candidates.sort(reverse=True)
        candidates, rejected = candidates[: 2 * beams], candidates[2 * beams :]
        gap = min([gap, *(a[0] - b[0] for a, b in pairwise(candidates + rejected[:1]))])
        live = [c for c in candidates if c[1][-1] != eos][:beams]
        finished += [
            (score / penalty(alpha, step + 1), tokens)
            for score, tokens in candidates
            if tokens[-1] == eos
        ]
        finished.sort(reverse=True)
        gap = min([gap, *(a[0] - b[0] for a, b in pairwise(finished))])
        finished = finished[:beams]
    found = finished or live
    found = found + [(-1e7, ())] * (beams - len(found))
    padded = [list(tokens) + [0] * (length - len(tokens)) for _, tokens in found]
    return padded, [score for score, _ in found], gap

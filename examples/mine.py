"""A source, a sampler, a gate and a metric of one's own, each to be copied; mine.gin uses them.

Next to a gin file, `import mine` finds this module. What the parts return is checked when they are
first called.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from m4.data.sources import Pair
from m4.eval.metrics import References, Statistics, each_of
from m4.model.routing import Capacity, Routing, Tokens, balance_loss, plan_choices, top_k
from m4.settings import Size, checked, configurable


@configurable
class Numbers:
    """A source (`m4.data.sources.Source`): numbers, and the same in another writing."""

    def __init__(self) -> None:
        self.words = {"gl": "número", "es": "cifra"}

    def language_pairs(self) -> list[str]:
        """Returns the names of its pairs of languages."""
        return [f"en-{code}" for code in self.words]

    def pairs(self, pair: str, split: str) -> Iterator[Pair]:
        """Yields the pairs of a split, in the same order every time."""
        first, last = {"train": (0, 120), "dev": (120, 128), "test": (128, 140)}[split]
        for number in range(first, last):
            yield Pair(f"number {number}", f"{self.words[pair.removeprefix('en-')]} {number}")

    def identity(self) -> dict:
        """Returns all that decides the text: it is the corpus's key."""
        return {"of": "Numbers", "version": 1}


@configurable
def square_root(sizes: dict[str, int]) -> dict[str, float]:
    """A sampler (`m4.data.samplers.Sampler`): rates by the root of the sizes, which sum to 1."""
    roots = {direction: size**0.5 for direction, size in sizes.items()}
    return {direction: root / sum(roots.values()) for direction, root in roots.items()}


@checked
def sigmoid_gate(
    tokens: Tokens, num_experts: int, capacity: Capacity, *, choices: Size = 1
) -> Routing:
    """A gate (`m4.model.routing.Gate`): the best experts, each weighted by its own sigmoid."""
    logits_GSE = tokens.score("router")
    best_GSK, expert_GSK = top_k(logits_GSE, choices)
    return plan_choices(
        expert_GSK,
        jax.nn.sigmoid(best_GSK),
        tokens.mask_GS,
        num_experts,
        capacity(choices),
        logits_GSE=logits_GSE,
        aux_loss=balance_loss(jax.nn.softmax(logits_GSE), expert_GSK, tokens.mask_GS),
    )


@configurable
def word_f1(
    hypotheses: Sequence[str], references: References, language: str, sources: Sequence[str]
) -> Statistics:
    """A metric (`m4.eval.metrics.Metric`): F1 of words; counts add up over sentences."""
    del language, sources
    firsts = [several[0] for several in each_of(references)]
    pairs = [
        (Counter(h.split()), Counter(r.split())) for h, r in zip(hypotheses, firsts, strict=True)
    ]
    rows = [[(h & r).total(), h.total() + r.total()] for h, r in pairs]

    def formula(sums: np.ndarray) -> np.ndarray:
        return 200.0 * sums[..., 0] / np.maximum(sums[..., 1], 1)

    return Statistics("word_f1", np.array(rows, np.int64).reshape(-1, 2), formula, "words|F1")

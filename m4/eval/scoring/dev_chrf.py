"""chrF of greedy translations of dev sentences, to stop training by."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from m4.data.cache.cache import Cache
from m4.data.directions import split_direction
from m4.data.preprocess import tag
from m4.eval.decoding.decode import TrainedModel, translations
from m4.eval.decoding.settings import Decoding
from m4.eval.decoding.testsets import split_pairs
from m4.eval.metrics.chrf import chrf


def dev_chrf(
    cache: Cache,
    ready: Callable[[Any, Decoding], TrainedModel],
    decoding: Decoding,
    directions: Sequence[str],
    limit: int | None = None,
) -> Callable[[Any], dict[str, float]]:
    """Returns a function of params: {"dev/chrf": mean chrF of greedy translations, percent}.

    chrF and not the loss picks a model trained on few sentences: its loss rises from overconfidence
    long before its translations stop improving.

    Args:
        ready: Gives parameters and settings to the model.
        directions: Directions that have dev sentences.
        limit: Number of sentences of each direction, the first ones. Defaults to all.
    """
    pairs = {d: found[:limit] for d, found in split_pairs(cache, directions, "dev").items()}
    numbers = [cache.directions.index(name) for name in pairs for _ in pairs[name]]
    sources = [tag(source, split_direction(direction)[1])
               for direction, sentences in pairs.items() for source, _ in sentences]  # fmt: skip
    # Of its settings only the lengths count, which are part of a baseline's identity.
    greedy = Decoding(
        beams=1,
        max_source_length=decoding.max_source_length,
        max_target_length=decoding.max_target_length,
        batch_rows=decoding.batch_rows,
    )

    def run(params: Any) -> dict[str, float]:
        model = ready(params, greedy)
        found = translations(model, sources, directions=numbers, on_cut=lambda *_: None)
        hypotheses = iter(each.texts[0] for each in found)
        scores = {}
        for direction, sentences in pairs.items():
            texts = [next(hypotheses) for _ in sentences]
            references = [reference for _, reference in sentences]
            scores[direction] = chrf(texts, references, split_direction(direction)[1]).value()
        return {
            "dev/chrf": float(np.mean(list(scores.values()))),
            **{f"dev/chrf/{direction}": score for direction, score in scores.items()},
        }

    return run

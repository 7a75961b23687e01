"""The ratios of target length to source length in a corpus, by direction."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.data.cache.shards import Folder, PairShards, SentenceShards
from m4.data.cache.tokens import bases, by_role, stem
from m4.data.directions import ROLES, SIDES, directions_of, pair_of, sides_of, split_direction
from m4.data.preprocess import EOS_IDS, TAG_IDS

# Tokens of a translation, whatever its source; and its tokens a token of the source, at least.
SPARE_TOKENS, LEAST_FACTOR = 16, 2
_MOST_PAIRS = 1_000_000


def length_factors(
    folder: Path, settings: Mapping[str, Any], counts: Mapping[str, Any], made: Mapping[str, Any]
) -> dict[str, float]:
    """Returns direction -> a, so that targets of 99.9% of the pairs fit a L + 16 tokens.

    L is the number of a source's tokens with tag and EOS, and a target has an EOS, too.

    Args:
        folder: A corpus's folder, with its arrays.
        settings: `CorpusSpec.settings`.
        counts: Pair of languages -> counts by split, as in the manifest.
        made: What `tokens.write_arrays` returned.
    """
    source_more, target_more = (0, 0) if "own_vocabularies" in settings else (
        TAG_IDS + EOS_IDS, EOS_IDS)  # fmt: skip
    shards, first = made["shards"]["train"], bases(made["sentences"]["train"])
    pairs = PairShards(Folder(folder), "train", shards["pairs"])
    stores = {
        role: SentenceShards(Folder(folder), stem("train", store), shards[store])
        for role in ROLES
        for store in (role if by_role(settings) else "",)
    }
    factors = {}
    for direction in directions_of(settings["mixture"] or "direct", [*counts]):
        begin, end = counts[pair_of(direction)]["train"]["rows"]
        if begin == end:
            continue
        numbers = pairs.take(np.arange(begin, end, max(1, (end - begin) // _MOST_PAIRS)))
        lengths = [
            stores[role].places(numbers[:, SIDES.index(side)] + first[code])[1]
            for side, role, code in zip(
                sides_of(direction), ROLES, split_direction(direction), strict=True
            )
        ]
        needed = (lengths[1] + target_more - SPARE_TOKENS) / (lengths[0] + source_more)
        factors[direction] = round(float(np.quantile(needed, 0.999, method="higher")), 3)
    return factors


def whole_factors(factors: Mapping[str, float], directions: Sequence[str]) -> dict[str, int]:
    """Returns target language -> a as a whole number, for the languages that need more than 2."""
    whole: dict[str, int] = {}
    for direction in directions:
        to, factor = split_direction(direction)[1], int(np.ceil(factors.get(direction, 0)))
        if factor > whole.get(to, LEAST_FACTOR):
            whole[to] = factor
    return whole

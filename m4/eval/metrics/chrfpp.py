"""chrF++ (Popović, 2017) as sacreBLEU computes it: chrF with words and pairs of words."""

import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from sacrebleu.metrics.chrf import CHRF

from m4.eval.metrics import References, Statistics, each_of
from m4.eval.metrics.chrf import Ngrams, characters, statistics
from m4.settings import configurable


@configurable
def chrfpp(
    hypotheses: Sequence[str], references: References, language: str, sources: Sequence[str] = ()
) -> Statistics:
    """Returns statistics of corpus chrF2++; the language is ignored."""
    del language, sources
    return statistics("chrfpp", CHRF(word_order=2), _ngrams, hypotheses, each_of(references))


@lru_cache(maxsize=2048)
def _ngrams(text: str) -> Ngrams:
    found: list[str] = []
    for word in text.split():
        # One ASCII punctuation mark is split off, at the end or otherwise at the beginning.
        if len(word) > 1 and word[-1] in string.punctuation:
            found += [word[:-1], word[-1]]
        elif len(word) > 1 and word[0] in string.punctuation:
            found += [word[0], word[1:]]
        else:
            found.append(word)
    return [*characters(text), Counter(found), Counter(map(" ".join, pairwise(found)))]

"""The dev and test sentences of a corpus, by direction, and their translation step by step."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn

from m4.core.report import Stage
from m4.data.cache import Cache
from m4.data.preprocess import split_direction
from m4.data.vocabulary import Vocabulary
from m4.eval.decode import decode


def language_of(direction: str) -> str:
    """The side of a direction that is not English: "gl" of "en-gl" and of "gl-en"."""
    source, target = split_direction(direction)
    return target if source == "en" else source


def split_pairs(
    cache: Cache, directions: Iterable[str], split: str
) -> dict[str, list[tuple[str, str]]]:
    """direction -> (source, reference) of every sentence of the split, in its order, untagged."""
    result = {}
    for direction in directions:
        pairs = cache.pairs(language_of(direction), split)
        if direction.startswith("en-"):
            result[direction] = [(pair.english, pair.foreign) for pair in pairs]
        else:
            result[direction] = [(pair.foreign, pair.english) for pair in pairs]
    return result


def check_held_out(cache: Cache) -> None:
    """Raises ValueError for a language that cannot have a fair baseline.

    Without dev sentences nothing says which parameters are best; without test sentences there is
    nothing to compare on.
    """
    for split in ("dev", "test"):
        if lacking := [code for code in cache.languages() if not cache.size(code, split)]:
            raise ValueError(
                f"no {split} sentences of {', '.join(lacking)}: bilingual baselines need them; "
                "leave these languages out (cache.prepare.languages), or add the files"
            )


class Showing:
    """`decode` for `decode_to_files`, call by call: progress in a stage, and a count of the sources
    that were too long (`cut`)."""

    def __init__(
        self,
        stage: Stage,
        model: nn.Module,
        params: Any,
        vocabulary: Vocabulary,
        settings: Mapping[str, Any],
    ) -> None:
        self.cut = 0
        self._stage, self._start = stage, time.monotonic()
        self._decode = lambda sources, **more: decode(
            model, params, vocabulary, sources, **settings, **more
        )
        self._sentences = self._tokens = 0

    def __call__(self, sources: Sequence[str]) -> list[str]:
        tokens = 0

        def progress(done: int, _: int, tokens_now: int) -> None:
            nonlocal tokens
            tokens = tokens_now
            rate = (self._tokens + tokens) / (time.monotonic() - self._start)
            self._stage.update(self._sentences + done, f"{rate:,.0f} tokens/s")

        def on_cut(*_: int) -> None:
            self.cut += 1

        hypotheses = self._decode(sources, progress=progress, on_cut=on_cut)
        self._sentences, self._tokens = self._sentences + len(sources), self._tokens + tokens
        return hypotheses

"""Whether a translation depends on what is translated next to it, or on how many devices do it.

It should not: a sentence's padded length follows from its own length, a search keeps rows apart, no
token is dropped. But programs of other shapes round otherwise, which decides where two candidates
are equal to nearly the last bit. The check translates sentences one by one, and again in other
ways, and compares tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from m4.eval.decoding.decode import Batch, Pieces, decode
from m4.eval.decoding.settings import Decoding
from m4.parallel.layout import Layout

# Rows a batch; the first is what the others are compared with.
ROWS = (1, 8, 64)
_SHUFFLE_SEED = 0


class Placed(NamedTuple):
    """Parameters, and how they are sharded; None: on one device."""

    params: Any
    layout: Layout | None = None

    @property
    def name(self) -> str:
        return "1 device" if self.layout is None else f"{self.layout.mesh.size} devices"


class Way(NamedTuple):
    """One way to translate the sentences. rows: of a batch; over a mesh those that divide over it,
    that many or more."""

    placed: Placed
    rows: int
    shuffled: bool = False

    @property
    def name(self) -> str:
        return f"{self.placed.name}, {self.rows} rows" + (", shuffled" if self.shuffled else "")


@dataclass
class Compared:
    """A direction's sentences. tokens: of the translations one by one, with EOS. changed: of them,
    those that are others or are not there, and new ones behind them, by way."""

    sentences: int = 0
    tokens: int = 0
    changed: Counter[str] = field(default_factory=Counter)


def ways(placed: Sequence[Placed]) -> list[Way]:
    """Batches of 1, 8 and 64 sentences, and of 64 in another order, on each of these."""
    return [
        Way(one, rows, shuffled)
        for one in placed
        for rows, shuffled in [*((rows, False) for rows in ROWS), (ROWS[-1], True)]
    ]


def changed_tokens(
    model: nn.Module,
    vocabulary: Pieces,
    sources: Mapping[str, Sequence[str]],
    settings: Decoding,
    chosen: Sequence[Way],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Compared]:
    """Direction -> how its translations in each way differ from those in the first one.

    sources: direction -> tagged sources. progress: called with the ways that are done.
    """
    texts = [text for each in sources.values() for text in each]
    result = {direction: Compared() for direction in sources}
    first: list[list[int]] = []
    for number, way in enumerate(chosen):
        found = _translated(model, vocabulary, texts, replace(settings, batch_rows=way.rows), way)
        first = first or found
        for compared, tokens, before in zip(_owners(result, sources), found, first, strict=True):
            if number == 0:
                compared.sentences += 1
                compared.tokens += len(tokens)
            else:
                compared.changed[way.name] += _changed(before, tokens)
        progress(number + 1)
    return result


def _owners(
    result: Mapping[str, Compared], sources: Mapping[str, Sequence[str]]
) -> Iterator[Compared]:
    return (result[direction] for direction, each in sources.items() for _ in each)


def _changed(before: Sequence[int], after: Sequence[int]) -> int:
    differ = sum(a != b for a, b in zip(before, after, strict=False))
    return differ + abs(len(before) - len(after))


def _translated(
    model: nn.Module, vocabulary: Pieces, texts: Sequence[str], settings: Decoding, way: Way
) -> list[list[int]]:
    """The tokens of each text's translation, in the order of the texts."""
    order = list(range(len(texts)))
    if way.shuffled:
        random.Random(_SHUFFLE_SEED).shuffle(order)
    found: list[list[int]] = [[] for _ in texts]

    def keep(batch: Batch, best_BT: np.ndarray) -> None:
        for b, row in enumerate(batch.rows):
            found[order[row]] = [int(token) for token in best_BT[b] if token]

    decode(
        model,
        way.placed.params,
        vocabulary,
        [texts[i] for i in order],
        settings,
        on_cut=lambda *_: None,
        on_batch=keep,
        layout=way.placed.layout,
    )
    return found

"""Trains the vocabularies of a corpus, on a sample of its text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m4.data import permutation
from m4.data.cache.corpus_text import BLOCK, Progress, take_numbers, texts_of_pairs
from m4.data.cache.tokens import vocabulary_file
from m4.data.directions import (
    ROLES,
    SIDES,
    directions_of,
    languages_of,
    pair_of,
    sides_of,
    split_direction,
)
from m4.data.preprocess import Form, normalised
from m4.data.samplers.temperature import temperature
from m4.data.stream import numba_loops
from m4.data.vocabulary import vocabulary
from m4.data.vocabulary.pieces import grow
from m4.data.vocabulary.vocabulary import Vocabulary


def train_vocabularies(
    folder: Path,
    sizes: dict[str, int],
    settings: Mapping[str, Any],
    progress: Progress,
    grown_from: Path | None,
) -> dict[str, dict[str, Any]]:
    """Trains the shared vocabulary, or one for sources, which has the tags, and one for targets.

    Args:
        sizes: Pair of languages -> number of training pairs.
        settings: `CorpusSpec.settings`.
        grown_from: The folder of the vocabularies that these grow from, if there is one.

    Returns:
        Role ("shared", or "source" and "target") -> what the manifest says of the vocabulary.
    """
    size, target_size = settings["vocabulary_size"], settings["target_vocabulary_size"]
    tags = languages_of(sizes)
    text = settings.get("vocabulary_text", sizes)
    every = dict.fromkeys(sizes, SIDES)
    wanted: list[tuple[str | None, int, Mapping[str, Sequence[str]], list[str]]]
    wanted = [(None, size, every, tags)]
    if target_size is not None:
        directions = directions_of(settings["mixture"], [*sizes])
        source, target = ({pair: [] for pair in sizes} for _ in ROLES)
        for direction in directions:
            for sides, side in zip((source, target), sides_of(direction), strict=True):
                sides[pair_of(direction)].append(side)
        wanted = [("source", size, source, tags), ("target", target_size, target, [])]
    made, lines = {}, {}
    for done, (role, pieces, sides, tags) in enumerate(wanted):
        form: Form = "nfc" if role == "target" else settings["normalization"]
        # A shared vocabulary sees each text as it is as a source, and as a target.
        forms: dict[Form, None] = dict.fromkeys([form] if role else [form, "nfc"])
        progress("vocabulary", done, len(wanted))
        path = vocabulary_file(folder, role)
        texts = sample(
            lambda pair, rows: texts_of_pairs(
                folder, "train", pair, take_numbers(folder, "train", pair)[rows], lines
            ),
            {pair: size for pair, size in sizes.items() if pair in text},
            sides,
            settings["vocabulary_sentences"],
            settings["vocabulary_temperature"],
        )
        texts = (normalised(text, each) for text in texts for each in forms)
        if grown_from is None:
            about = vocabulary.train(path, texts, pieces, tags, form=form)
        else:
            old = Vocabulary(vocabulary_file(grown_from, role))
            about = grow(path, old, texts, pieces, tags)
        made[role or "shared"] = {**about, "fingerprint": Vocabulary(path).fingerprint}
    progress("vocabulary", len(wanted), len(wanted))
    return made


def sample(
    text: Callable[[str, npt.NDArray[np.int64]], tuple[list[str], list[str]]],
    sizes: Mapping[str, int],
    sides: Mapping[str, Sequence[str]],
    sentences: int,
    temperature_: float,
) -> Iterator[str]:
    """Yields training sentences for a vocabulary, of every language by temperature.

    A language's sentences are those of all its pairs, one after another. Its share is taken from a
    keyed permutation of them, as many times over as it needs. No other text is read.

    Args:
        text: Pair of languages and some of its rows -> both sides of these.
        sizes: Pair -> number of training pairs.
        sides: Pair -> the sides that are taken.
        sentences: Number of sentences in all.
    """
    totals: dict[str, int] = {}
    firsts: dict[tuple[str, str], int] = {}  # of a pair's side, among the sentences of its language
    for pair, size in sizes.items():
        for side, code in zip(SIDES, split_direction(pair), strict=True):
            if side in sides[pair]:
                firsts[pair, side] = totals.get(code, 0)
                totals[code] = firsts[pair, side] + size
    rates = dict.fromkeys(totals, 0.0) | temperature(
        {code: size for code, size in totals.items() if size}, temperature_
    )
    budget = min(sentences, sum(totals.values()))
    for pair, size in sizes.items():
        codes = dict(zip(SIDES, split_direction(pair), strict=True))
        for start in range(0, size, BLOCK):
            stop, times = min(start + BLOCK, size), {}
            for side in SIDES[::-1]:
                if side in sides[pair]:
                    first, code = firsts[pair, side], codes[side]
                    rows = totals[code], first + start, first + stop, code
                    times[side] = _times(*rows, round(budget * rates[code]))
            needed = np.flatnonzero(np.any([*times.values(), np.zeros(stop - start, bool)], axis=0))
            if not len(needed):
                continue
            texts = dict(zip(SIDES, text(pair, start + needed), strict=True))
            for place, row in enumerate(needed.tolist()):
                for side, of_row in times.items():
                    for _ in range(of_row[row]):
                        yield texts[side][place]


def _times(size: int, start: int, stop: int, name: str, wanted: int) -> npt.NDArray[np.int64]:
    """Returns how often each row from start to stop - 1 of `size` is in a sample of `wanted`."""
    rows = np.arange(start, stop, dtype=np.uint64)
    key = np.uint64(permutation.key("vocabulary", name))
    place = numba_loops.permute_each(rows, np.uint64(size), key).astype(np.int64)
    return wanted // size + (place < wanted % size)

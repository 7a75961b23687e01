"""Builds a cache's folder: text, vocabulary, token arrays, manifest. See cache.py for its use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.data import permutation, vocabulary
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS, Source
from m4.data.text import Report, read_pairs, text_file, write_text
from m4.data.tokens import tokenize
from m4.data.vocabulary import Vocabulary


def build(folder: Path, source: Source, settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """Write everything but the manifest into `folder`; return the manifest's contents.

    settings: languages, vocabulary_size, vocabulary_sentences, vocabulary_temperature,
    source_length, target_length, as in cache.prepare.
    """
    languages = settings["languages"]
    (folder / "text").mkdir(parents=True)
    counts = write_text(folder, source, languages, report)
    report("vocabulary", 0, 1)
    model = folder / "vocabulary.model"
    sample = _sample(
        folder,
        languages,
        counts,
        settings["vocabulary_sentences"],
        settings["vocabulary_temperature"],
    )
    made = vocabulary.train(model, sample, settings["vocabulary_size"], ["en", *languages])
    report("vocabulary", 1, 1)
    tokenize(folder, Vocabulary(model), languages, counts, settings, report)
    return {
        "languages": counts,
        "vocabulary": {**made, "fingerprint": Vocabulary(model).fingerprint},
        "skipped": {
            f"{name}: {why}": n for (name, why), n in getattr(source, "skipped", {}).items()
        },
        "corpus": hashlib.sha256(
            json.dumps({c: [counts[c][s]["sha256"] for s in SPLITS] for c in languages}).encode()
        ).hexdigest(),
    }


def _sample(
    folder: Path,
    languages: Sequence[str],
    counts: dict[str, dict[str, dict[str, Any]]],
    sentences: int,
    temperature_: float,
) -> Iterator[str]:
    """Training sentences for the vocabulary: English and every language by temperature.

    A language's share is taken from a keyed permutation of its sentences, as many times over
    as it needs.
    """
    sizes = {code: counts[code]["train"]["pairs"] for code in languages}
    total = sum(sizes.values())
    rates = temperature({"en": total, **sizes}, temperature_)
    budget = min(sentences, 2 * total)
    first = 0
    for code in languages:
        # English sentences are counted over all languages; each file gives its own stretch.
        taken = {
            1: _times(sizes[code], 0, sizes[code], round(budget * rates[code]), code),
            0: _times(total, first, first + sizes[code], round(budget * rates["en"]), "en"),
        }
        first += sizes[code]
        for row, pair in enumerate(read_pairs(text_file(folder, "train", code))):
            for side, times in taken.items():
                for _ in range(times[row]):
                    yield pair[side]


def _times(size: int, start: int, stop: int, wanted: int, name: str) -> list[int]:
    """How often each of the rows start ... stop - 1 of `size` is in a sample of `wanted`."""
    rows = np.arange(start, stop, dtype=np.uint64)
    keys = np.full_like(rows, permutation.key("vocabulary", name))
    place = permutation.permute(rows, np.full_like(rows, size), keys).astype(np.int64)
    return (wanted // size + (place < wanted % size)).tolist()

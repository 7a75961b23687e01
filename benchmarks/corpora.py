"""Corpora for benchmarks/data.py: many languages of power-law sizes; token arrays of any size."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from m4.data.cache.cache import Cache
from m4.data.cache.shards import write_pairs, write_sentences
from m4.data.directions import split_direction
from m4.data.languages import LANGUAGES
from m4.data.sources import Source
from m4.data.sources.cldr import Cldr
from m4.data.sources.tsv import Tsv
from m4.data.vocabulary import Ragged
from m4.storage.files import write_json

# Pieces of a news sentence: lognormal, median 26, 1 % above 105.
_MEDIAN, _SPREAD = 26, 0.6
_CHUNK = 1 << 20


def text(folder: str, languages: int) -> tuple[Source, list[str]]:
    """Returns a source and its codes, from a folder of TSV files or the embedded corpus.

    The latter has 10,000 pairs of the largest language down to 120 of the smallest.
    """
    if folder:
        source = Tsv(folder, on_bad_line="skip")
        return source, source.language_pairs()[:languages]
    codes = list(LANGUAGES)[:languages]
    sizes = np.geomspace(10_000, 120, len(codes)).astype(int)
    return Cldr(dict(zip(codes, sizes.tolist(), strict=True))), codes


def enlarge(cache: Cache, folder: Path, gigabytes: float) -> Cache:
    """Returns a cache with random training arrays of this size and sentences as long as news.

    Languages and vocabulary are those of `cache`; sizes fall log-linearly to 1/200 of the largest
    language's. There is no text.
    """
    folder.mkdir(parents=True)
    for path in (
        *cache.folder.glob("*.model"),
        *cache.folder.glob("dev.*"),
        *cache.folder.glob("test.*"),
    ):
        shutil.copy(path, folder)
    rng = np.random.default_rng(0)
    codes = cache.language_pairs()
    # Two sides of 33 ids of two bytes on average, two offsets and two numbers of four bytes.
    mean = _MEDIAN * math.exp(_SPREAD**2 / 2) * 0.96
    weights = np.geomspace(1, 1 / 200, len(codes))
    pairs = np.maximum(weights / weights.sum() * gigabytes * 1e9 / (4 * mean + 16), 300).astype(int)
    limit = cache.source_length - 2
    manifest = json.loads(json.dumps(cache.manifest))
    sizes, row = {"en": int(pairs.sum())}, 0
    ratios = {"en": 1.0} | {split_direction(c)[1]: rng.uniform(0.8, 1.25) for c in codes}
    for code, size in zip(codes, pairs.tolist(), strict=True):
        sizes[split_direction(code)[1]] = size
        both = {"first": mean, "second": mean * ratios[split_direction(code)[1]]}
        manifest["language_pairs"][code]["train"] |= {
            "pairs": size,
            "rows": [row, row + size],
            "mean_pieces": both,
            "longest": dict.fromkeys(both, limit),
        }
        row += size
    ids = rng.integers(300, 2000, int(_CHUNK * 60)).astype(np.uint16)

    def lengths(of: int, ratio: float, noise: float) -> Iterator[Ragged]:
        """Returns lengths of one side's sentences; the other side's are similar."""
        for start in range(0, int(pairs[of]), _CHUNK):
            number = min(_CHUNK, int(pairs[of]) - start)
            drawn = np.random.default_rng([of, start]).lognormal(math.log(_MEDIAN), _SPREAD, number)
            drawn *= ratio * rng.lognormal(0, noise, number)
            found = np.clip(drawn, 1, limit).astype(np.int64)
            yield Ragged(ids[: found.sum()], found)

    def sentences() -> Iterator[Ragged]:
        for of in range(len(codes)):
            yield from lengths(of, 1.0, 0.0)
        for of, code in enumerate(codes):
            yield from lengths(of, ratios[split_direction(code)[1]], 0.15)

    def numbers() -> Iterator[np.ndarray]:  # each language's sentences in order
        row = 0
        for size in pairs.tolist():
            yield np.stack([np.arange(row, row + size), np.arange(size)], axis=1)
            row += size

    manifest["sentences"]["train"] = sizes
    manifest["shards"]["train"] = {
        "": write_sentences(folder, "train", sentences(), np.uint16),
        "pairs": write_pairs(folder, "train", numbers()),
    }
    manifest["fingerprint"] = f"made up, {gigabytes} GB"
    write_json(folder / "manifest.json", manifest)
    return Cache(folder)

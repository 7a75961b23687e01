"""Corpora for benchmarks/data.py: many languages of power-law sizes; token arrays of any size."""

import json
import math
import shutil
from pathlib import Path

import numpy as np

from m4.data.cache.cache import Cache, manifest_digest
from m4.data.languages import LANGUAGES
from m4.data.sources import Source
from m4.data.sources.cldr import Cldr
from m4.data.sources.tsv import Tsv

# Pieces of a news sentence: lognormal, median 26, 1 % above 105.
_MEDIAN, _SPREAD = 26, 0.6
_CHUNK_PAIRS = 1 << 20


def text(folder: str, languages: int) -> tuple[Source, list[str]]:
    """Returns the source and its codes, of a folder of TSV files or of the embedded corpus.

    The latter has 10,000 pairs of the largest language down to 120 of the smallest.
    """
    if folder:
        source = Tsv(folder, on_bad_line="skip")
        return source, source.language_pairs()[:languages]
    codes = list(LANGUAGES)[:languages]
    sizes = np.geomspace(10_000, 120, len(codes)).astype(int)
    return Cldr(dict(zip(codes, sizes.tolist(), strict=True))), codes


def enlarge(cache: Cache, folder: Path, gigabytes: float) -> Cache:
    """A cache whose training arrays are made up: so many gigabytes, with sentences as long as news.

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
    # Two sides of 33 ids of two bytes on average, and two offsets of eight.
    mean = _MEDIAN * math.exp(_SPREAD**2 / 2) * 0.96
    weights = np.geomspace(1, 1 / 200, len(codes))
    pairs = np.maximum(weights / weights.sum() * gigabytes * 1e9 / (4 * mean + 16), 300).astype(int)
    limit = cache.source_length - 2
    manifest = json.loads(json.dumps(cache.manifest))
    total = int(pairs.sum())
    offsets = {
        side: np.lib.format.open_memmap(
            folder / f"train.{side}.offsets.npy", mode="w+", dtype=np.int64, shape=(total + 1,)
        )
        for side in ("first", "second")
    }
    row, ends = 0, dict.fromkeys(offsets, 0)
    for code, size in zip(codes, pairs.tolist(), strict=True):
        ratio = rng.uniform(0.8, 1.25)  # of the language's sentences to English ones
        about = {"first": [0, 0], "second": [0, 0]}  # ids, the longest
        for start in range(row, row + size, _CHUNK_PAIRS):
            number = min(_CHUNK_PAIRS, row + size - start)
            english = rng.lognormal(math.log(_MEDIAN), _SPREAD, number)
            foreign = english * ratio * rng.lognormal(0, 0.15, number)
            for side, values in (("first", english), ("second", foreign)):
                lengths = np.clip(values, 1, limit).astype(np.int64)
                part = ends[side] + np.cumsum(lengths)
                offsets[side][start + 1 : start + 1 + number] = part
                ends[side] = int(part[-1])
                about[side][0] += int(lengths.sum())
                about[side][1] = max(about[side][1], int(lengths.max()))
        manifest["language_pairs"][code]["train"] |= {
            "pairs": size,
            "rows": [row, row + size],
            "mean_pieces": {side: ids / size for side, (ids, _) in about.items()},
            "longest": {side: longest for side, (_, longest) in about.items()},
        }
        row += size
    block = rng.integers(300, 2000, 1 << 22).astype(np.uint16)
    for side, end in ends.items():
        _write_tokens(folder / f"train.{side}.tokens.npy", end, block)
        offsets[side].flush()
    manifest["fingerprint"] = f"made up, {gigabytes} GB"
    manifest["sha256"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return Cache(folder)


def _write_tokens(path: Path, count: int, block: np.ndarray) -> None:
    """So many tokens: the block, again and again."""
    tokens = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(count,))
    for start in range(0, count, len(block)):
        tokens[start : start + len(block)] = block[: count - start]
    tokens.flush()

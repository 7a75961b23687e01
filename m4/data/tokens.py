"""The token arrays of a cache: every sentence tokenized once, flat, with offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.data.sources import SPLITS, Pair
from m4.data.text import Report, read_pairs, text_file
from m4.data.vocabulary import EOS_ID, PAD_ID, Vocabulary

SIDES = ("english", "foreign")
_CHUNK_PAIRS = 20_000


def tokenize(
    folder: Path,
    vocabulary_: Vocabulary,
    languages: Sequence[str],
    counts: dict[str, dict[str, dict[str, Any]]],
    settings: dict[str, Any],
    report: Report,
) -> None:
    """Text -> <split>.<side>.{tokens,offsets}.npy; too long train pairs leave the text too."""
    total = sum(counts[code][split]["pairs"] for split in SPLITS for code in languages)
    dtype = np.uint16 if vocabulary_.size <= 1 << 16 else np.int32
    # Every side is source in one direction, with tag and eos, and target in the other, with eos.
    longest = min(settings["source_length"] - 2, settings["target_length"] - 1)
    done = 0
    for split in SPLITS:
        tokens: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
        lengths: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
        row = 0
        for code in languages:
            count, path = counts[code][split], text_file(folder, split, code)
            digest, too_long, kept_pairs = hashlib.sha256(), 0, 0
            sums = dict.fromkeys(SIDES, 0)
            most = dict.fromkeys(SIDES, 0)
            temporary = path.with_suffix(".kept")
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                for chunk in _chunks(read_pairs(path), _CHUNK_PAIRS):
                    ids = [vocabulary_.encode(side) for side in zip(*chunk, strict=True)]
                    length = np.array([[len(i) for i in side] for side in ids])
                    long = (length > longest).any(axis=0)
                    too_long += int(long.sum())
                    keep = ~long if split == "train" else np.ones_like(long)
                    lines = "".join(
                        f"{pair.english}\t{pair.foreign}\n"
                        for pair, kept in zip(chunk, keep, strict=True)
                        if kept
                    )
                    file.write(lines)
                    digest.update(lines.encode())
                    for side, side_ids, side_length in zip(SIDES, ids, length, strict=True):
                        flat = [
                            i for s, kept in zip(side_ids, keep, strict=True) if kept for i in s
                        ]
                        tokens[side].append(np.array(flat, dtype))
                        lengths[side].append(side_length[keep])
                        sums[side] += len(flat)
                        most[side] = max(most[side], int(side_length[keep].max(initial=0)))
                    kept_pairs += int(keep.sum())
                    done += len(chunk)
                    report("tokens", done, total)
            temporary.replace(path)
            if split == "train" and not kept_pairs:
                raise ValueError(
                    f"language {code!r} has no training pairs: all {too_long} are longer than "
                    f"{longest} pieces (jobs.Setup.lengths)"
                )
            count |= {
                "pairs": kept_pairs,
                "rows": [row, row + kept_pairs],
                "too_long": too_long,
                "mean_pieces": {s: round(n / max(kept_pairs, 1), 3) for s, n in sums.items()},
                "longest": most,
                "sha256": digest.hexdigest(),
            }
            row += kept_pairs
        for side in SIDES:
            offsets = np.zeros(row + 1, np.int64)
            np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths[side]]), out=offsets[1:])
            flat_tokens = np.concatenate([np.zeros(0, dtype), *tokens[side]])
            np.save(folder / f"{split}.{side}.tokens.npy", flat_tokens)
            np.save(folder / f"{split}.{side}.offsets.npy", offsets)
    pairs = {code: counts[code]["train"]["pairs"] for code in languages}
    np.save(folder / "token_counts.npy", _count_tokens(folder, vocabulary_, pairs))


def _count_tokens(
    folder: Path, vocabulary_: Vocabulary, pairs: dict[str, int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[V]: how often a model takes in each id when every training pair comes once each way.

    Each side is a source, with tag and eos, and a target, whose eos is predicted and not taken in;
    the decoder's first input is pad.
    """
    totals = np.zeros(vocabulary_.size, np.int64)
    for side in SIDES:
        flat_tokens = np.load(folder / f"train.{side}.tokens.npy")
        totals += 2 * np.bincount(flat_tokens, minlength=vocabulary_.size)
    for code, number in pairs.items():
        for target_language in ("en", code):
            totals[vocabulary_.tag_id(target_language)] += number
    for id_ in (EOS_ID, PAD_ID):
        totals[id_] += 2 * sum(pairs.values())
    return totals


def _chunks(pairs: Iterator[Pair], size: int) -> Iterator[list[Pair]]:
    chunk: list[Pair] = []
    for pair in pairs:
        chunk.append(pair)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

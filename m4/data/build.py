"""Builds a cache's folder: text, vocabulary, token arrays, manifest. See cache.py for its use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m4.data import permutation, vocabulary
from m4.data.clean import HeldOut
from m4.data.samplers.temperature import temperature
from m4.data.sources import SPLITS, Pair, Source
from m4.data.vocabulary import EOS_ID, PAD_ID, Vocabulary

Report = Callable[[str, int, int], None]
SIDES = ("english", "foreign")
_CHUNK_PAIRS = 20_000


def text_file(folder: Path, split: str, language: str) -> Path:
    return folder / "text" / f"{split}.{language}.tsv"


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a cache's own text file: nothing in it needs checking."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            english, foreign = line.removesuffix("\n").split("\t")
            yield Pair(english, foreign)


def build(folder: Path, source: Source, settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """Write everything but the manifest into `folder`; return the manifest's contents.

    settings: languages, vocabulary_size, vocabulary_sentences, temperature, source_length,
    target_length, as in cache.prepare.
    """
    languages = settings["languages"]
    (folder / "text").mkdir(parents=True)
    counts = _write_text(folder, source, languages, report)
    report("vocabulary", 0, 1)
    model = folder / "vocabulary.model"
    sample = _sample(
        folder, languages, counts, settings["vocabulary_sentences"], settings["temperature"]
    )
    made = vocabulary.train(model, sample, settings["vocabulary_size"], ["en", *languages])
    report("vocabulary", 1, 1)
    _tokenize(folder, Vocabulary(model), languages, counts, settings, report)
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


def _write_text(
    folder: Path, source: Source, languages: Sequence[str], report: Report
) -> dict[str, dict[str, dict[str, Any]]]:
    """Source -> text/<split>.<lang>.tsv, without train pairs that overlap with dev or test."""
    counts: dict[str, dict[str, dict[str, Any]]] = {code: {} for code in languages}
    held_out, done, subsets = HeldOut(), 0, getattr(source, "subsets", None)
    for split in reversed(SPLITS):  # test and dev first: train must know them
        for code in languages:
            report("text", done, len(SPLITS) * len(languages))
            kept = overlap = 0
            with text_file(folder, split, code).open("w", encoding="utf-8", newline="\n") as file:
                for pair in source.pairs(code, split):
                    if split != "train":
                        held_out.add(pair.english)
                    elif pair.english in held_out:
                        overlap += 1
                        continue
                    file.write(_line(pair, code, split))
                    kept += 1
            counts[code][split] = {"pairs": kept, "overlap": overlap}
            if split == "train" and not kept:
                why = (
                    f"all {overlap} are in a dev or test set" if overlap else "the source has none"
                )
                raise ValueError(f"language {code!r} has no training pairs: {why}")
            if subsets is not None and split != "train":
                parts = {name: list(map(bool, part)) for name, part in subsets(code, split).items()}
                assert all(len(part) == kept for part in parts.values()), (code, split)
                text_file(folder, split, code).with_suffix(".subsets.json").write_text(
                    json.dumps(parts)
                )
            done += 1
    report("text", done, done)
    return counts


def _line(pair: Pair, code: str, split: str) -> str:
    if any(c in side for side in pair for c in "\t\n\r"):
        raise ValueError(f"{code} {split}: a tab or line end inside a sentence: {pair!r}")
    return f"{pair.english}\t{pair.foreign}\n"


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


def _tokenize(
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

"""The text of a cache: cleaned pairs, one TSV file a split and language."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from m4.data.clean import HeldOut
from m4.data.sources import SPLITS, Pair, Source

Report = Callable[[str, int, int], None]


def text_file(folder: Path, split: str, language: str) -> Path:
    return folder / "text" / f"{split}.{language}.tsv"


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a cache's own text file: nothing in it needs checking."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            english, foreign = line.removesuffix("\n").split("\t")
            yield Pair(english, foreign)


def write_text(
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

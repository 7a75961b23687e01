"""The text of a cache: cleaned pairs, one TSV file a split and language."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from m4.data.cache.origins import Recorded
from m4.data.cleaning.clean import Cleaner, Cleaning, lines_of
from m4.data.cleaning.english_side import EnglishSides
from m4.data.cleaning.ledger import Count, Ledger
from m4.data.directions import base_language
from m4.data.sources import SPLITS, Pair, Source
from m4.settings import InputError

Progress = Callable[[str, int, int], None]  # (stage, done, total)


def text_file(folder: Path, split: str, language: str) -> Path:
    return folder / "text" / f"{split}.{language}.tsv"


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a cache's own text file: nothing in it needs checking."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            english, translation = line.removesuffix("\n").split("\t")
            yield Pair(english, translation)


def write_text(
    folder: Path,
    source: Source,
    languages: Sequence[str],
    cleaning: Cleaning,
    progress: Progress,
    untrained: Collection[str] = (),
) -> tuple[dict[str, dict[str, dict[str, Any]]], Ledger]:
    """Writes the cleaned text of a source, text/<split>.<language>.tsv.

    Returns:
        {language: {split: {"pairs": number}}}, and the ledger.

    Raises:
        InputError: A language has no training pairs, or pairs without English.
    """
    counts: dict[str, dict[str, dict[str, Any]]] = {code: {} for code in languages}
    done, subsets = 0, getattr(source, "subsets", None)
    recorded, sides = Recorded(source), EnglishSides()
    cleaner = Cleaner(
        cleaning, cast(Source, recorded), languages, folder / "text", on_read=sides.add
    )
    for split in reversed(SPLITS):  # test and dev first: train must know them
        for code in languages:
            progress("text", done, len(SPLITS) * len(languages))
            kept, text = 0, text_file(folder, split, code)
            with text.open("w", encoding="utf-8", newline="\n") as file:
                # Other text of a language is trained on alone, also where a hash decides splits.
                used = split == "train" or base_language(code) == code
                for chunk in cleaner.pairs(code, split) if used else ():
                    if split != "train":
                        chunk = cleaning.normalise_all(chunk)
                    file.write(lines_of(chunk, code, split))
                    recorded.keep(chunk.numbers, text)
                    kept += len(chunk)
            sides.check(code, split)
            counts[code][split] = {"pairs": kept, **recorded.end(text)}
            if split == "train" and not kept and code not in untrained:
                raise InputError(
                    f"language {code!r} has no training pairs: "
                    f"{why_none(cleaner.ledger.count(code, split))}"
                )
            if subsets is not None and split != "train":
                parts = {name: list(map(bool, part)) for name, part in subsets(code, split).items()}
                assert all(len(part) == kept for part in parts.values()), (code, split)
                text.with_suffix(".subsets.json").write_text(json.dumps(parts))
            done += 1
    progress("text", done, done)
    return counts, cleaner.finish()


def why_none(count: Count) -> str:
    """Why nothing is left of what was read."""
    if not count.read:
        return "the source has none"
    reasons = ", ".join(f"{reason} {pairs:,}" for reason, pairs in count.dropped.most_common())
    return f"all {count.read:,} are dropped: {reasons} (Cleaning.stages)"

"""The text of a cache: cleaned pairs, one TSV file a split and pair of languages."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from m4.data.beam import Engine
from m4.data.cache.origins import Recorded
from m4.data.cleaning.chunk import chunks
from m4.data.cleaning.clean import Cleaner, Cleaning, lines_of
from m4.data.cleaning.english_side import EnglishSides
from m4.data.cleaning.ledger import Count, Ledger
from m4.data.directions import is_held_out, key_of
from m4.data.sources import SPLITS, Pair, Source
from m4.settings import InputError

Progress = Callable[[str, int, int], None]  # (stage, done, total)


def text_file(folder: Path, split: str, pair: str) -> Path:
    return folder / "text" / f"{split}.{key_of(pair)}.tsv"


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a cache's own text file: nothing in it needs checking."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            first, second = line.removesuffix("\n").split("\t")
            yield Pair(first, second)


def write_text(
    folder: Path,
    source: Source,
    pairs: Sequence[str],
    cleaning: Cleaning,
    progress: Progress,
    untrained: Collection[str] = (),
    engine: Engine | None = None,
) -> tuple[dict[str, dict[str, dict[str, Any]]], Ledger]:
    """Writes the cleaned text of a source, text/<split>.<key of the pair>.tsv.

    Args:
        pairs: Names of the pairs of languages.
        untrained: Those that may lack training pairs.
        engine: Cleans training text. Defaults to this process.

    Returns:
        {pair: {split: {"pairs": number}}}, and the ledger.

    Raises:
        InputError: A pair has no training text, or text in another language than it says.
    """
    counts: dict[str, dict[str, dict[str, Any]]] = {pair: {} for pair in pairs}
    done, subsets = 0, getattr(source, "subsets", None)
    recorded, sides = Recorded(source), EnglishSides()
    cleaner = Cleaner(cleaning, cast(Source, recorded), pairs, folder / "text", on_read=sides.add)
    text_of, origins_of = cleaner, recorded
    for split in reversed(SPLITS):  # test and dev first: train must know them
        if split == "train" and engine is not None:
            for pair in pairs:
                sides.read(pair, split, chunks(source.pairs(pair, split)))
                sides.check(pair, split)
            text_of = origins_of = engine.clean(cleaner, cleaning, source, pairs, progress)
        for pair in pairs:
            progress("text", done, len(SPLITS) * len(pairs))
            kept, text = 0, text_file(folder, split, pair)
            with text.open("w", encoding="utf-8", newline="\n") as file:
                # Other text of a language is trained on alone, also where a hash decides splits.
                used = split == "train" or is_held_out(pair)
                for chunk in text_of.pairs(pair, split) if used else ():
                    if split != "train":
                        chunk = cleaning.normalise_all(chunk)
                    file.write(lines_of(chunk, pair, split))
                    origins_of.keep(chunk.numbers, text)
                    kept += len(chunk)
            sides.check(pair, split)
            counts[pair][split] = {"pairs": kept, **origins_of.end(text)}
            if split == "train" and not kept and pair not in untrained:
                raise InputError(
                    f"{pair} has no training pairs: {why_none(cleaner.ledger.count(pair, split))}"
                )
            if subsets is not None and split != "train":
                parts = {name: list(map(bool, part)) for name, part in subsets(pair, split).items()}
                assert all(len(part) == kept for part in parts.values()), (pair, split)
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

"""`m4 data audit`: the cleaning of a corpus without training, and what it says about the corpus.

data_report.json and data_report.html report what was read, kept, dropped, changed and flagged;
dropped.jsonl.gz lists the pairs that were dropped.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from m4.data.cache.cache import Cache, OtherFormat
from m4.data.cache.identity import differences, identity_of
from m4.data.cleaning import clean
from m4.data.cleaning.chunk import Chunk
from m4.data.cleaning.clean import Cleaner, Cleaning, OnDrop
from m4.data.cleaning.ledger import Count, Ledger
from m4.data.corpus import CorpusSpec
from m4.data.inspection.columns import Columns
from m4.data.languages import describe, is_english
from m4.data.sources import SPLITS, Pair, Source
from m4.storage.files import whole, write_text

PIECES = "pieces: too long"
REVERSED = "columns: reversed"
# A language that loses so much of its training text is named.
_LOSS = 0.2
AuditProgress = Callable[[int, int, str], None]


def audit(
    spec: CorpusSpec,
    folder: Path,
    cleaning: Cleaning | None = None,
    on_drop: OnDrop | None = None,
    progress: AuditProgress = lambda *_: None,
) -> Ledger:
    """Runs a cleaning, by default the corpus's own, over all languages and splits.

    Nothing is tokenized. What is too long in pieces is known where `folder` has the corpus's cache,
    made with the same settings; else it is "not checked". progress(done, total, what).
    """
    cleaning = spec.cleaning if cleaning is None else cleaning
    settings = dataclasses.replace(spec, cleaning=cleaning).settings()
    languages = settings["languages"]
    cache, why = _cache_of(folder, spec.opened_source, settings)
    total, done, columns = len(SPLITS) * len(languages), 0, Columns()
    with tempfile.TemporaryDirectory(prefix="m4-audit-") as spool:
        cleaner = Cleaner(
            cleaning,
            spec.opened_source,
            languages,
            Path(spool),
            on_drop=on_drop,
            on_read=columns.add,
        )
        for split in reversed(SPLITS):
            for code in languages:
                progress(done, total, f"{split} {code}")
                count = cleaner.ledger.count(code, split)
                chunks = cleaner.pairs(code, split)
                if cache is not None and split == "train":
                    _drop_what_is_not_there(chunks, cache.pairs(code, split), count, code, on_drop)
                else:
                    for _ in chunks:
                        pass
                if cache is None:
                    count.not_checked[f"pieces: {why}"] = count.kept
                elif split != "train":
                    tokenized = cache.ledger().count(code, split)
                    count.leave_out(PIECES, tokenized.flagged[PIECES], split)
                done += 1
        progress(total, total, "")
        for code, split in columns.reversed():
            count = cleaner.ledger.count(code, split)
            count.flagged[REVERSED] = count.read
        return cleaner.finish()


def _cache_of(folder: Path, source: Source, settings: dict[str, Any]) -> tuple[Cache | None, str]:
    """The corpus's cache, or why there is none to count pieces with."""
    if not (folder / "manifest.json").is_file():
        return None, "not tokenized yet"
    try:
        cache = Cache(folder)
    except OtherFormat:
        return None, "tokenized by another version of m4"
    identity = identity_of(source, settings)
    if differences(cache.manifest["identity"], identity):
        return None, "tokenized with other settings"
    return cache, ""


def _drop_what_is_not_there(
    chunks: Iterator[Chunk],
    cached: Iterator[Pair],
    count: Count,
    language: str,
    on_drop: OnDrop | None,
) -> None:
    """Cleaned training pairs that are not in the cache were too long to be tokenized: the cache
    has the others, in their order."""
    wanted = next(cached, None)
    for chunk in chunks:
        rows = zip(chunk.numbers.tolist(), chunk.english, chunk.translation, strict=True)
        for number, english, translation in rows:
            pair = Pair(english, translation)
            if pair == wanted:
                wanted = next(cached, None)
                continue
            count.drop(PIECES, 1)
            if on_drop is not None:
                on_drop(PIECES, language, "train", number, pair)
    assert wanted is None, f"{language}: the cache has text that the source has not"


@contextmanager
def listing(path: Path, reason: str) -> Iterator[OnDrop]:
    """Writes dropped pairs whose reason begins with `reason`, a JSON object a line, gzipped:
    reason, language, split, pair (its number in the source's order, from 1), english, translation.
    """
    with (
        whole(path) as unfinished,
        unfinished.open("wb") as raw,
        # Without a name and a time in it: the same list is the same file.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):

        def add(why: str, language: str, split: str, number: int, pair: Pair) -> None:
            if why.startswith(reason):
                row = {"reason": why, "language": language, "split": split, "pair": number}
                text = json.dumps({**row, **pair._asdict()}, ensure_ascii=False) + "\n"
                packed.write(text.encode("utf-8", "backslashreplace"))

        yield add


def write_report(folder: Path, ledger: Ledger) -> tuple[Path, Path]:
    """data_report.json and data_report.html; returns their paths."""
    from m4.data.inspection.audit_page import page  # jinja2: not for jobs that only read

    report = {
        **ledger.as_json(),
        "stages_not_run": stages_not_run(ledger),
        "total": {split: ledger.total(split).as_json() for split in SPLITS},
        "warnings": warnings(ledger),
    }
    paths = folder / "data_report.json", folder / "data_report.html"
    text = json.dumps(report, indent=1, ensure_ascii=False)
    # A half of a surrogate pair, which an example may show, is no UTF-8.
    write_text(paths[0], text.encode("utf-8", "backslashreplace").decode("utf-8"))
    write_text(paths[1], page(ledger, report["stages_not_run"], report["warnings"]))
    return paths


def stages_not_run(ledger: Ledger) -> list[str]:
    """The stages that there are and that the corpus's cleaning has not."""
    return [stage.name for stage in clean.thorough().stages if stage.name not in ledger.stages]


def english_variants(ledger: Ledger) -> list[str]:
    """A line for each language of the corpus that is English too."""
    return [
        f"{describe(code).name} ({code}): English on both sides of its pairs; where you do not "
        "mean to translate into it, name the other languages (CorpusSpec.languages)"
        for code in ledger.counts
        if is_english(code)
    ]


def warnings(ledger: Ledger) -> list[str]:
    """What somebody should look at, a line each."""
    lines = english_variants(ledger)
    for code, splits in ledger.counts.items():
        name = describe(code).name
        if swapped := [split for split in SPLITS if splits.get(split, Count()).flagged[REVERSED]]:
            lines.append(
                f"{name} ({code}): English is on the side of the translations in "
                f"{', '.join(swapped)}: swap the columns (TSV: Tsv.english_column = 2)"
            )
        train = splits.get("train", Count())
        dropped = sum(train.dropped.values())
        if train.read and not train.kept:
            lines.append(f"{name} ({code}): no training pair is left")
        elif dropped > _LOSS * train.read:
            worst, pairs = train.dropped.most_common(1)[0]
            lines.append(
                f"{name} ({code}): {dropped / train.read:.0%} of the training pairs are dropped, "
                f"{pairs:,} of them: {worst}"
            )
    dev = ledger.total("dev").flagged
    if pairs := sum(n for why, n in dev.items() if why.startswith("overlap: english")):
        lines.append(f"{pairs:,} dev pairs have an English side that is in a test set")
    for stage in ledger.stages:
        reasons = {w: n for w, n in ledger.total().not_checked.items() if w.startswith(f"{stage}:")}
        lines += [f"{why}: the stage did not run" for why in reasons if "not installed" in why]
    return lines


def tables(ledger: Ledger) -> list[Table]:
    """For the terminal: training pairs by reason, and by language and stage."""
    total = ledger.total()
    by_reason = Table("reason", "dropped", "changed", "flagged", title="By reason")
    for column in by_reason.columns[1:]:
        column.justify = "right"
    counters = (total.dropped, total.changed, total.flagged)
    reasons = [why for counter in counters for why, n in counter.most_common() if n]
    for why in dict.fromkeys(reasons):
        by_reason.add_row(
            why, *(f"{counter[why]:,}" if counter[why] else "" for counter in counters)
        )
    stages = _by_stage(total.dropped)
    by_language = Table("", "language", "read", "kept", *stages, title="Training pairs by language")
    for column in by_language.columns[2:]:
        column.justify = "right"
    for code, splits in ledger.counts.items():
        if count := splits.get("train"):
            dropped = _by_stage(count.dropped)
            by_language.add_row(
                code,
                describe(code).name,
                f"{count.read:,}",
                f"{count.kept:,}",
                *(f"{dropped[stage]:,}" if stage in dropped else "" for stage in stages),
            )
    train = ledger.total("train")
    train = ledger.total("train")
    sums = _by_stage(train.dropped)
    by_language.add_section()
    by_language.add_row(
        "", "all", f"{train.read:,}", f"{train.kept:,}", *(f"{sums.get(s, 0):,}" for s in stages)
    )
    return [by_reason, by_language]


def _by_stage(counted: Any) -> dict[str, int]:
    """'overlap: english side in dev' -> 'overlap': the sum of each stage, the largest first."""
    sums: dict[str, int] = {}
    for reason, pairs in counted.items():
        stage = reason.split(":")[0]
        sums[stage] = sums.get(stage, 0) + pairs
    return {stage: pairs for stage, pairs in sorted(sums.items(), key=lambda s: -s[1]) if pairs}

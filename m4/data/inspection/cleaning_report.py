"""Cleans a corpus without training, and reports what is dropped, changed and flagged."""

import dataclasses
import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from m4.data.cache.cache import Cache
from m4.data.cache.identity import fingerprint_of, identity_of
from m4.data.cleaning import clean
from m4.data.cleaning.clean import Cleaner, Cleaning, OnDrop
from m4.data.cleaning.english_side import NEITHER, SAID, EnglishSides
from m4.data.cleaning.ledger import ANY, Count, Ledger
from m4.data.corpus import CorpusSpec
from m4.data.languages import describe, is_english
from m4.data.sources import SPLITS, Pair
from m4.storage.files import whole, write_text

REPORT = "data_report"
PIECES = "pieces: too long"
REVERSED, NO_ENGLISH = "columns: reversed", "columns: no English"
_TEMPLATE = Path(__file__).with_name("cleaning_report.html.j2")
# A language that loses a larger share of its training pairs is named in a warning.
_LARGE_LOSS = 0.2
_MOST_EXAMPLES = 40

# Characters that show nothing: controls, direction marks, joiners, halves of surrogate pairs.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    "\u3000\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff]"
)


def clean_corpus(
    spec: CorpusSpec,
    folder: Path,
    cleaning: Cleaning | None = None,
    on_drop: OnDrop | None = None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Ledger:
    """Cleans all languages and splits of a corpus; nothing is tokenized.

    Args:
        folder: Where the tokenized corpus is, if it was built. Its counts of pairs that are too
            long in pieces are taken over; else these are "not checked".
        cleaning: Defaults to the corpus's own.
        on_drop: Called with (reason, language, split, number, pair) of each dropped training pair.
        progress: Called with (done, total, what is read).
    """
    cleaning = spec.cleaning if cleaning is None else cleaning
    settings = dataclasses.replace(spec, cleaning=cleaning).settings()
    built, why = _tokenized(folder, spec, settings)
    sides = EnglishSides()
    parts = [(split, code) for split in reversed(SPLITS) for code in settings["languages"]]
    with tempfile.TemporaryDirectory(prefix="m4-cleaning-") as spool:
        cleaner = Cleaner(
            cleaning,
            spec.opened_source,
            settings["languages"],
            Path(spool),
            on_drop=on_drop,
            on_read=sides.add,
        )
        for done, (split, code) in enumerate(parts):
            progress(done, len(parts), f"{split} {code}")
            for _ in cleaner.pairs(code, split):
                pass
            count = cleaner.ledger.count(code, split)
            if built is None:
                count.not_checked[f"pieces: {why}"] = count.kept
            else:
                tokenized = built.count(code, split)
                too_long = (tokenized.dropped + tokenized.flagged)[PIECES]
                count.leave_out(PIECES, too_long, split)
        progress(len(parts), len(parts), "")
        for (code, split), side in sides.found().items():
            if side != "english":
                count = cleaner.ledger.count(code, split)
                count.flagged[NO_ENGLISH if side == NEITHER else REVERSED] = count.read
        return cleaner.finish()


def _tokenized(
    data_dir: Path, spec: CorpusSpec, settings: dict[str, Any]
) -> tuple[Ledger | None, str]:
    """Returns the ledger of the tokenized corpus, or why there is none of these settings."""
    folder = data_dir / fingerprint_of(identity_of(spec.opened_source, settings))
    if not (folder / "manifest.json").is_file():
        return None, "not tokenized yet"
    return Cache(folder).ledger(), ""


@contextmanager
def listing(path: Path, reason: str) -> Iterator[OnDrop]:
    """Writes the dropped pairs whose reason begins with `reason` as gzipped JSON lines.

    Each has reason, language, split, pair (its number in the source's order, from 1), english and
    translation.
    """
    with (
        whole(path) as unfinished,
        unfinished.open("wb") as raw,
        # Without a name and a time in it, the same list is the same file.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):

        def add(why: str, language: str, split: str, number: int, pair: Pair) -> None:
            if why.startswith(reason):
                row = {"reason": why, "language": language, "split": split, "pair": number}
                text = json.dumps({**row, **pair._asdict()}, ensure_ascii=False) + "\n"
                packed.write(text.encode("utf-8", "backslashreplace"))

        yield add


def write_report(folder: Path, ledger: Ledger) -> tuple[Path, Path]:
    """Writes data_report.json and data_report.html; returns their paths."""
    from m4 import html  # jinja2: not for jobs that only read

    not_run, lines = stages_not_run(ledger), warnings(ledger)
    totals = {split: ledger.total(split) for split in SPLITS}
    report = {
        **ledger.as_json(),
        "stages_not_run": not_run,
        "total": {split: total.as_json() for split, total in totals.items()},
        "warnings": lines,
    }
    paths = folder / f"{REPORT}.json", folder / f"{REPORT}.html"
    text = json.dumps(report, indent=1, ensure_ascii=False)
    # An example may have half of a surrogate pair, which is not UTF-8.
    write_text(paths[0], text.encode("utf-8", "backslashreplace").decode("utf-8"))
    rows = [
        {"code": code, "split": split, "count": count, "dropped": sum(count.dropped.values())}
        for code, splits in ledger.counts.items()
        for split, count in splits.items()
    ]
    page = html.render(
        _TEMPLATE,
        {"visible": visible, "share": _share, "name": _name, "tag": _tag},
        totals=totals,
        total=ledger.total(),
        stages=ledger.stages,
        not_run=not_run,
        warnings=lines,
        reasons=_reasons(ledger),
        dropped_reasons=ledger.reasons("dropped"),
        flagged_reasons=ledger.reasons("flagged"),
        trained=sorted(
            (row for row in rows if row["split"] in ("train", ANY) and row["count"].read),
            key=lambda row: -row["dropped"] / row["count"].read,
        ),
        flagged=[row for row in rows if row["count"].flagged.total()],
        examples=_examples(ledger),
    )
    write_text(paths[1], page)
    return paths


def stages_not_run(ledger: Ledger) -> list[str]:
    """Returns the names of the stages that exist and that the corpus's cleaning does not have."""
    return [stage.name for stage in clean.thorough().stages if stage.name not in ledger.stages]


def english_variants(ledger: Ledger) -> list[str]:
    """Returns a line for each language of the corpus that is a variant of English."""
    return [
        f"{describe(code).name} ({code}): English on both sides of its pairs; where you do not "
        "mean to translate into it, name the other languages (CorpusSpec.languages)"
        for code in ledger.counts
        if is_english(code)
    ]


def warnings(ledger: Ledger) -> list[str]:
    """Returns a line for each thing that somebody should look at."""
    lines = english_variants(ledger)
    for code, splits in ledger.counts.items():
        name = f"{describe(code).name} ({code})"
        for flag, side in ((REVERSED, "translation"), (NO_ENGLISH, NEITHER)):
            if wrong := [each for each in SPLITS if splits.get(each, Count()).flagged[flag]]:
                lines.append(f"{name}, {', '.join(wrong)}: {SAID[side]}")
        train = splits.get("train", Count())
        dropped = train.dropped.total()
        if train.read and not train.kept:
            lines.append(f"{name}: no training pair is left")
        elif dropped > _LARGE_LOSS * train.read:
            worst, pairs = train.dropped.most_common(1)[0]
            lines.append(
                f"{name}: {dropped / train.read:.0%} of the training pairs are dropped, "
                f"{pairs:,} of them: {worst}"
            )
    dev = ledger.total("dev").flagged
    if pairs := sum(n for why, n in dev.items() if why.startswith("overlap: english")):
        lines.append(f"{pairs:,} dev pairs have an English side that is in a test set")
    missing = [why for why in ledger.reasons("not_checked") if "not installed" in why]
    return lines + [f"{why}: the stage did not run" for why in missing]


def tables(ledger: Ledger) -> list[Table]:
    """Returns two tables for the terminal: pairs by reason; training pairs by language."""
    by_reason = Table("reason", "dropped", "changed", "flagged", title="By reason")
    for why, counts in _reasons(ledger).items():
        by_reason.add_row(why, *(f"{pairs:,}" if pairs else "" for pairs in counts))
    stages = _by_stage(ledger.total().dropped)
    by_language = Table("language", "read", "kept", *stages, title="Training pairs by language")
    rows = {f"{code} {describe(code).name}": s.get("train") for code, s in ledger.counts.items()}
    for name, count in {**rows, "all": ledger.total("train")}.items():
        if count:
            dropped = _by_stage(count.dropped)
            cells = (count.read, count.kept, *(dropped.get(stage, 0) for stage in stages))
            by_language.add_row(name, *(f"{pairs:,}" if pairs else "" for pairs in cells))
    for table in (by_reason, by_language):
        for column in table.columns[1:]:
            column.justify = "right"
    return [by_reason, by_language]


def _by_stage(counted: Mapping[str, int]) -> dict[str, int]:
    """Sums reasons by stage, the largest first: 'overlap: english side in dev' is of 'overlap'."""
    sums: Counter[str] = Counter()
    for reason, pairs in counted.items():
        sums[reason.split(":")[0]] += pairs
    return {stage: pairs for stage, pairs in sums.most_common() if pairs}


def _reasons(ledger: Ledger) -> dict[str, tuple[int, int, int]]:
    """Returns reason -> pairs (dropped, changed, flagged), the most frequent dropped ones first."""
    total = ledger.total()
    counters = (total.dropped, total.changed, total.flagged)
    names = dict.fromkeys(why for counter in counters for why, n in counter.most_common() if n)
    return {why: (total.dropped[why], total.changed[why], total.flagged[why]) for why in names}


def _examples(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """Returns reason -> examples, of as many languages as possible."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for code, splits in ledger.counts.items():
        for split, count in splits.items():
            for why, some in count.examples.items():
                rows = ({"code": code, "split": split, "pair": one} for one in some)
                found.setdefault(why, []).extend(enumerate(rows))
    return {
        why: [row for _, row in sorted(found[why], key=lambda one: one[0])[:_MOST_EXAMPLES]]
        for why in _reasons(ledger)
        if why in found
    }


def visible(text: str) -> list[tuple[bool, str]]:
    """Splits a text into (is it a code point?, text), with invisible characters as 'U+200B'."""
    parts, last = [], 0
    for match in _INVISIBLE.finditer(text):
        parts += [(False, text[last : match.start()]), (True, f"U+{ord(match[0]):04X}")]
        last = match.end()
    return [part for part in [*parts, (False, text[last:])] if part[1]]


def _share(part: int, total: int) -> str:
    """Formats a share as '3.1%'; small ones as '<0.1%', so that none looks like nothing."""
    if not part or not total:
        return ""
    share = 100 * part / total
    return "<0.1%" if share < 0.05 else f"{share:.1f}%"


def _name(code: str) -> str:
    return "several languages" if code == ANY else describe(code).name


def _tag(code: str) -> str:
    return describe(code).code.replace("_", "-")

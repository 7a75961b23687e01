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

from m4.data.cache.cache import Cache, fingerprint_of, identity_of
from m4.data.cleaning import clean
from m4.data.cleaning.clean import Cleaner, Cleaning, OnDrop
from m4.data.cleaning.english_side import EnglishSides
from m4.data.cleaning.ledger import ANY, Count, Ledger
from m4.data.corpus import CorpusSpec
from m4.data.directions import key_of, split_direction
from m4.data.languages import describe, is_english, title_of
from m4.data.sources import SPLITS, Pair
from m4.storage.files import whole, write_text

REPORT = "data_report"
PIECES = "pieces: too long"
WRONG = "languages: "
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
    """Cleans all pairs of languages and splits of a corpus; nothing is tokenized.

    Args:
        folder: Where the tokenized corpus is, if it was built. Its counts of pairs that are too
            long in pieces are taken over; else these are "not checked".
        cleaning: Defaults to the corpus's own.
        progress: Called with (done, total, what is read).
    """
    cleaning = spec.cleaning if cleaning is None else cleaning
    settings = dataclasses.replace(spec, cleaning=cleaning).settings()
    tokens = folder / fingerprint_of(identity_of(spec.opened_source, settings))
    built = Cache(tokens).ledger() if (tokens / "manifest.json").is_file() else None
    sides = EnglishSides()
    names = spec.read_pairs()
    parts = [(split, pair) for split in reversed(SPLITS) for pair in names]
    with tempfile.TemporaryDirectory(prefix="m4-cleaning-") as spool:
        cleaner = Cleaner(
            cleaning, spec.opened_source, names, Path(spool), on_drop=on_drop, on_read=sides.add
        )
        for done, (split, pair) in enumerate(parts):
            progress(done, len(parts), f"{split} {key_of(pair)}")
            for _ in cleaner.pairs(pair, split):
                pass
            count = cleaner.ledger.count(pair, split)
            if built is None:
                count.not_checked["pieces: not tokenized yet"] = count.kept
            else:
                tokenized = built.count(pair, split)
                too_long = (tokenized.dropped + tokenized.flagged)[PIECES]
                count.leave_out(PIECES, too_long, split)
        progress(len(parts), len(parts), "")
        for (pair, split), said in sides.found().items():
            count = cleaner.ledger.count(pair, split)
            count.flagged[f"{WRONG}{said}"] = count.read
        return cleaner.finish()


@contextmanager
def listing(path: Path, reason: str) -> Iterator[OnDrop]:
    """Writes the dropped pairs whose reason begins with `reason` as gzipped JSON lines.

    Each has reason, languages, split, pair (its number in the source's order, from 1), first and
    second.
    """
    with (
        whole(path) as unfinished,
        unfinished.open("wb") as raw,
        # Without a name and a time in it, the same list is the same file.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):

        def add(why: str, pair: str, split: str, number: int, texts: Pair) -> None:
            if why.startswith(reason):
                row = {"reason": why, "languages": pair, "split": split, "pair": number}
                text = json.dumps({**row, **texts._asdict()}, ensure_ascii=False) + "\n"
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
        {"code": pair, "split": split, "count": count, "dropped": sum(count.dropped.values())}
        for pair, splits in ledger.counts.items()
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
        f"{_name(pair)} ({key_of(pair)}): English on both sides of its pairs; where you do not "
        "mean to translate into it, name the other languages (CorpusSpec.languages)"
        for pair in ledger.counts
        if pair != ANY and all(map(is_english, split_direction(pair)))
    ]


def warnings(ledger: Ledger) -> list[str]:
    """Returns a line for each thing that somebody should look at."""
    lines = english_variants(ledger)
    for pair, splits in ledger.counts.items():
        name = f"{_name(pair)} ({key_of(pair)})"
        wrong: dict[str, list[str]] = {}
        for split in SPLITS:
            for flag in splits.get(split, Count()).flagged:
                if flag.startswith(WRONG):
                    wrong.setdefault(flag.removeprefix(WRONG), []).append(split)
        lines += [f"{name}, {', '.join(splits)}: {said}" for said, splits in wrong.items()]
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
    if pairs := sum(n for why, n in dev.items() if why.startswith("overlap: first")):
        lines.append(f"{pairs:,} dev pairs have a first side that is in a test set")
    missing = [why for why in ledger.reasons("not_checked") if "not installed" in why]
    return lines + [f"{why}: the stage did not run" for why in missing]


def tables(ledger: Ledger) -> list[Table]:
    """Returns two tables for the terminal: pairs by reason; training pairs by language."""
    by_reason = Table("reason", "dropped", "changed", "flagged", title="By reason")
    for why, counts in _reasons(ledger).items():
        by_reason.add_row(why, *(f"{pairs:,}" if pairs else "" for pairs in counts))
    stages = _by_stage(ledger.total().dropped)
    by_language = Table("languages", "read", "kept", *stages, title="Training pairs by language")
    rows = {f"{key_of(pair)} {_name(pair)}": s.get("train") for pair, s in ledger.counts.items()}
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
    for pair, splits in ledger.counts.items():
        for split, count in splits.items():
            for why, some in count.examples.items():
                rows = ({"code": pair, "split": split, "pair": one} for one in some)
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


def _name(pair: str) -> str:
    return "several languages" if pair == ANY else title_of(key_of(pair))


def _tag(pair: str, side: int = 1) -> str:
    """Returns the HTML language tag of a side of a pair."""
    codes = [pair] if pair == ANY else split_direction(pair)
    return describe(codes[-1 if side else 0]).code.replace("_", "-")

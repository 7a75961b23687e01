"""Cleaning of a corpus without training, with a report on dropped, changed and flagged pairs."""

import dataclasses
import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.table import Column, Table

from m4.data.cache.cache import Cache, fingerprint_of, identity_of
from m4.data.cleaning import clean
from m4.data.cleaning.clean import Cleaner, Cleaning, OnDrop
from m4.data.cleaning.english_side import EnglishSides
from m4.data.cleaning.ledger import ANY, Count, Ledger
from m4.data.corpus import CorpusSpec
from m4.data.directions import key_of, split_direction
from m4.data.languages import is_english, title_of
from m4.data.sources import SPLITS, Pair
from m4.storage.files import whole, write_text

REPORT = "data_report"
PIECES = "pieces: too long"
WRONG = "languages: "
_TEMPLATE = Path(__file__).with_name("cleaning_report.html.j2")
# Share of a language's training pairs whose loss causes a warning.
_LARGE_LOSS = 0.2


def clean_corpus(
    spec: CorpusSpec, folder: Path, cleaning: Cleaning | None = None, on_drop: OnDrop | None = None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Ledger:  # fmt: skip
    """Cleans all language pairs and splits of a corpus, without tokenizing.

    Args:
        folder: Folder of the tokenized corpus, if it was built. Its counts of pairs with too many
            pieces are copied; otherwise these are "not checked".
        cleaning: Cleaning to apply. Defaults to the corpus's own.
        progress: Called with (done, total, what is read).
    """
    cleaning = cleaning or spec.cleaning
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
        # Without name and time, so that the same list gives the same file.
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
    from m4 import html  # imports jinja2, which jobs that only read do not need

    total = {split: ledger.total(split) for split in SPLITS}
    not_run, lines = stages_not_run(ledger), warnings(ledger)
    report = ledger.as_json() | {
        "stages_not_run": not_run,
        "total": {split: count.as_json() for split, count in total.items()},
        "warnings": lines,
    }
    paths = folder / f"{REPORT}.json", folder / f"{REPORT}.html"
    write_text(paths[0], json.dumps(report, indent=1, ensure_ascii=False))
    page = html.render(
        _TEMPLATE, train=total["train"], not_run=not_run, warnings=lines, tables=_tables(ledger)
    )
    write_text(paths[1], page)
    return paths


def stages_not_run(ledger: Ledger) -> list[str]:
    """Returns the names of stages that the corpus's cleaning does not have."""
    return [stage.name for stage in clean.thorough().stages if stage.name not in ledger.stages]


def english_variants(ledger: Ledger) -> list[str]:
    """Returns a line for each language that is a variant of English."""
    return [
        f"{_name(pair)} ({key_of(pair)}): English on both sides of its pairs; where you do not "
        "mean to translate into it, name the other languages (CorpusSpec.languages)"
        for pair in ledger.counts
        if pair != ANY and all(map(is_english, split_direction(pair)))
    ]


def warnings(ledger: Ledger) -> list[str]:
    """Returns a line for each problem that a user should look at."""
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
            lost = f"{dropped / train.read:.0%} of the training pairs are dropped"
            lines.append(f"{name}: {lost}, {pairs:,} of them: {worst}")
    dev = ledger.total("dev").flagged
    if pairs := sum(n for why, n in dev.items() if why.startswith("overlap: first")):
        lines.append(f"{pairs:,} dev pairs have a first side that is in a test set")
    missing = [why for why in ledger.reasons("not_checked") if "not installed" in why]
    return lines + [f"{why}: the stage did not run" for why in missing]


def tables(ledger: Ledger) -> list[Table]:
    """Returns two tables for the terminal: pairs by reason; training pairs by language."""
    made = []
    for title, (first, *others), rows in _tables(ledger):
        made.append(Table(first, *(Column(name, justify="right") for name in others), title=title))
        for row in rows:
            made[-1].add_row(*row)
    return made


def _tables(ledger: Ledger) -> list[tuple[str, list[str], list[list[str]]]]:
    """Returns (title, columns, rows) of `tables`."""

    def row(name: str, *counts: int) -> list[str]:
        return [name, *(f"{pairs:,}" if pairs else "" for pairs in counts)]

    total = ledger.total()
    counters = (total.dropped, total.changed, total.flagged)
    reasons = dict.fromkeys(why for of in counters for why, pairs in of.most_common() if pairs)
    by_reason = [row(why, *(of[why] for of in counters)) for why in reasons]
    stages = [stage for stage, _ in (+_by_stage(total.dropped)).most_common()]
    counts = {f"{key_of(pair)} {_name(pair)}": s.get("train") for pair, s in ledger.counts.items()}
    by_language = []
    for name, count in {**counts, "all": ledger.total("train")}.items():
        if count:
            dropped = _by_stage(count.dropped)
            by_language.append(row(name, count.read, count.kept, *(dropped[s] for s in stages)))
    return [
        ("By reason", ["reason", "dropped", "changed", "flagged"], by_reason),
        ("Training pairs by language", ["languages", "read", "kept", *stages], by_language),
    ]


def _by_stage(counted: Mapping[str, int]) -> Counter[str]:
    """Sums counts of reasons by stage: 'overlap: first side in dev' belongs to 'overlap'."""
    sums: Counter[str] = Counter()
    for reason, pairs in counted.items():
        sums[reason.split(":")[0]] += pairs
    return sums


def _name(pair: str) -> str:
    return "several languages" if pair == ANY else title_of(key_of(pair))

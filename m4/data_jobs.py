"""The jobs of `m4 data ...`: they look at the corpus, train nothing and start no accelerator.

Each takes a `Setup` and, by name, the options that its line in `m4.__main__.DATA_JOBS` declares.
"""

import sys
from typing import Any

from rich.table import Table

from m4.core.report import Stage
from m4.data import audit as audits
from m4.data import clean, vocabulary_report
from m4.data.languages import describe
from m4.data.preprocess import split_direction
from m4.experiment import Setup, console, corpus, corpus_settings


def preview(setup: Setup) -> None:
    """How often each direction is drawn: pairs and share of the stream."""
    cache = corpus(setup)
    sizes = cache.sizes()
    rates = setup.sampler(sizes)
    table = Table("direction", "language", "pairs", "share")
    for direction, share in rates.items():
        source, target = split_direction(direction)
        name = describe(target if source == "en" else source).name
        table.add_row(direction, name, f"{sizes[direction]:,}", f"{share:.2%}")
    console().print(table)


def audit(setup: Setup, stages: str, list: str | None) -> None:
    """Cleans the corpus and tells what is dropped and why; nothing is tokenized.

    stages: "configured" or "all". list: the beginning of the reasons whose pairs are written to
    dropped.jsonl.gz, "" for all; None: no list. Writes data_report.json and data_report.html.
    """
    # With `instead` what comes back is no cache.
    found: Any = setup.corpus(**corpus_settings(setup), instead=lambda corpus: corpus)
    cleaning = clean.thorough(found.cleaning.stages) if stages == "all" else found.cleaning
    path = setup.folder / "dropped.jsonl.gz"
    with Stage("audit", 100, "%") as stage:

        def progress(done: int, total: int, what: str) -> None:
            stage.update(round(100 * done / max(total, 1)), what)

        if list is None:
            ledger = audits.audit(found, cleaning, progress=progress)
        else:
            with audits.listing(path, list) as on_drop:
                ledger = audits.audit(found, cleaning, on_drop, progress)
    written = audits.write_report(setup.folder, ledger)
    screen = console()
    for table in audits.tables(ledger):
        screen.print(table)
    for line in audits.warnings(ledger):
        screen.print(line, style="yellow", markup=False)
    if not_run := audits.stages_not_run(ledger):
        screen.print(f"stages not run: {', '.join(not_run)} (clean.Cleaning.stages, --stages=all)")
    if list and not any(why.startswith(list) for why in ledger.reasons("dropped")):
        known = "; ".join(ledger.reasons("dropped")) or "none"
        raise ValueError(f"--list={list}: nothing is dropped for that; reasons: {known}")
    for file in (*written, *([] if list is None else [path])):
        screen.print(str(file), highlight=False, soft_wrap=True)


def vocabulary(setup: Setup, sentences: int = 2000, warn_above: float = 0.01) -> None:
    """What the vocabulary makes of each language; vocabulary_report.json and .html in MODEL_DIR.

    sentences: of each language that are looked at. warn_above: share of bytes among the pieces.
    """
    if sentences < 1 or not 0.0 <= warn_above <= 1.0:
        raise ValueError(
            f"--sentences={sentences} --warn_above={warn_above}: must be at least 1, and a share "
            "between 0 and 1"
        )
    cache = corpus(setup)
    rows = vocabulary_report.measure(cache, sentences)
    console().print(vocabulary_report.table(rows))
    for path in vocabulary_report.write(setup.folder, cache, rows, warn_above):
        console().print(str(path), highlight=False, soft_wrap=True)
    if worst := vocabulary_report.spelled_out(rows, warn_above):
        named = ", ".join(f"{row.language} {row.rates()['byte_share']:.1%}" for row in worst[:10])
        more = f" and {len(worst) - 10} more" if len(worst) > 10 else ""
        print(
            f"more than {warn_above:.1%} of the pieces are bytes: {named}{more} "
            "(cache.prepare.vocabulary_size, cache.prepare.vocabulary_temperature)",
            file=sys.stderr,
        )

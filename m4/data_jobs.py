"""The jobs of `m4 data ...`: they look at the corpus, train nothing and start no accelerator.

Each takes a `Setup` and, by name, the options that its line in `m4.arguments.DATA_JOBS` declares.
"""

import dataclasses
import functools
import json
import sys
from typing import Any

from m4.data.cleaning import clean
from m4.data.inspection import audit as audits
from m4.data.inspection import preview as previews
from m4.data.inspection import vocabulary_report
from m4.data.inspection.preview import Column, drawn_of
from m4.data.samplers import Sampler
from m4.data.samplers.temperature import temperature
from m4.data.samplers.uniform import uniform
from m4.eval.report import preview_page as preview_page
from m4.experiment import Setup, console, corpus, corpus_settings, training_stream
from m4.progress import ProgressBar
from m4.storage.files import write_text


def preview(setup: Setup, temperatures: str, most_epochs: float) -> None:
    """How often each language would be seen in training, with the sampler and at temperatures.

    temperatures: numbers from 1 on or inf, separated by commas, to compare with. most_epochs:
    languages that the sampler repeats more often are warned of. Writes data_preview.json, .html,
    .png and .pdf.
    """
    others = _temperatures(temperatures)
    if not 0 < most_epochs < float("inf"):
        raise ValueError(f"--most_epochs={most_epochs}: must be above 0")
    cache = corpus(setup)
    columns = []
    with ProgressBar("preview", 1 + len(others), "samplers") as stage:
        stream = training_stream(setup, cache)
        columns.append(Column("configured", drawn_of(cache, stream, setup.total_steps)))
        for name, value in others.items():
            stage.update(len(columns), name)
            sampler: Sampler = functools.partial(temperature, temperature=value)
            if value == float("inf"):
                sampler = uniform
            try:
                stream = training_stream(dataclasses.replace(setup, sampler=sampler), cache)
            except ValueError as error:  # a share that is too small to draw; the rest goes on
                columns.append(Column(name, {}, str(error)))
                continue
            columns.append(Column(name, drawn_of(cache, stream, setup.total_steps)))
        stage.update(len(columns))
    name = getattr(setup.sampler, "__name__", type(setup.sampler).__name__)
    pairs, tokens = previews.corpus_sizes(cache)
    seen = previews.Preview(setup.total_steps, name, setup.sample_by, pairs, tokens, columns)
    made = previews.as_json(seen, most_epochs)
    path = setup.folder / "data_preview.json"
    write_text(path, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    files = [path, *preview_page.write(seen, most_epochs, setup.folder)]
    screen = console()
    screen.print(previews.table(seen, most_epochs))
    for line in previews.warnings(seen, most_epochs):
        screen.print(line, style="yellow", markup=False)
    for written in files:
        screen.print(str(written), highlight=False, soft_wrap=True)


def _temperatures(text: str) -> dict[str, float]:
    """'1,5,inf' -> {"T=1": 1.0, "T=5": 5.0, "T=∞": inf}; empty text: none."""
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not value >= 1:
            raise ValueError(
                f"--temperatures={text}: {part!r} must be a number from 1 on, or inf; "
                "with commas between them"
            )
        found["T=∞" if value == float("inf") else f"T={value:g}"] = value
    return found


def audit(setup: Setup, stages: str, list: str | None) -> None:
    """Cleans the corpus and tells what is dropped and why; nothing is tokenized.

    stages: "configured" or "all". list: the beginning of the reasons whose pairs are written to
    dropped.jsonl.gz, "" for all; None: no list. Writes data_report.json and data_report.html.
    """
    # With `instead` what comes back is the CorpusSpec.
    found: Any = setup.corpus(**corpus_settings(setup), instead=lambda corpus: corpus)
    cleaning = clean.thorough(found.cleaning.stages) if stages == "all" else found.cleaning
    folder, path = setup.folder / "data", setup.folder / "dropped.jsonl.gz"
    with ProgressBar("audit", 100, "%") as stage:

        def progress(done: int, total: int, what: str) -> None:
            stage.update(round(100 * done / max(total, 1)), what)

        if list is None:
            ledger = audits.audit(found, folder, cleaning, progress=progress)
        else:
            with audits.listing(path, list) as on_drop:
                ledger = audits.audit(found, folder, cleaning, on_drop, progress)
    written = audits.write_report(setup.folder, ledger)
    screen = console()
    for table in audits.tables(ledger):
        screen.print(table)
    for line in audits.warnings(ledger):
        screen.print(line, style="yellow", markup=False)
    if not_run := audits.stages_not_run(ledger):
        screen.print(f"stages not run: {', '.join(not_run)} (clean.Cleaning.stages, --stages=all)")
    if list and not any(why.startswith(list) for why in ledger.reasons("dropped")):
        # A clean corpus is no mistake; a reason that cannot be is one.
        known = [*ledger.stages, "source", "pieces", *ledger.reasons("dropped")]
        text = f"--list={list}: nothing is dropped for that"
        if not any(stage.startswith(list) or list.startswith(f"{stage}:") for stage in known):
            raise ValueError(f"{text}; stages and reasons: {'; '.join(known)}")
        screen.print(text, markup=False)
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

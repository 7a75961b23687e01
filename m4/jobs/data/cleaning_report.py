"""`m4 data cleaning_report`: reports what cleaning drops and why; nothing is tokenized."""

import argparse
from contextlib import nullcontext

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 data cleaning_report --gin_file=gin_configs/demo.gin --stages=all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    text = "run the stages that the config names, or all stages (default: configured)"
    parser.add_argument("--stages", choices=["configured", "all"], default="configured", help=text)
    text = "write dropped.jsonl.gz with every dropped pair, or those of a stage or reason"
    parser.add_argument("--list", nargs="?", const="", metavar="REASON", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Cleans the corpus and writes data_report.json and data_report.html."""
    with command.opened(arguments, "data", computes=False) as run:
        from m4.data.cache.cache import fingerprint_of
        from m4.data.cleaning import clean
        from m4.data.inspection import cleaning_report as reports
        from m4.jobs import corpus
        from m4.progress import ProgressBar
        from m4.storage.local_copy import finished_folder, local_place

        spec, listed = run.experiment.data.corpus, arguments.list
        cleaning = spec.cleaning
        if arguments.stages == "all":
            cleaning = clean.thorough(cleaning.stages)
        place = corpus.place_of(run.experiment)
        # A built corpus has the counts already.
        finished_folder(place, fingerprint_of(spec.identity()))
        path = run.folder / "dropped.jsonl.gz"
        listing = nullcontext() if listed is None else reports.listing(path, listed)
        with ProgressBar("cleaning", 100, "%") as bar, listing as on_drop:

            def progress(done: int, total: int, what: str) -> None:
                bar.update(round(100 * done / max(total, 1)), what)

            folder = local_place(place)
            ledger = reports.clean_corpus(spec, folder, cleaning, on_drop, progress)
        written = reports.write_report(run.folder, ledger)
    screen = streams.console()
    for table in reports.tables(ledger):
        screen.print(table)
    for line in reports.warnings(ledger):
        screen.print(line, style="yellow")
    if not_run := reports.stages_not_run(ledger):
        screen.print(f"stages not run: {', '.join(not_run)} (clean.Cleaning.stages, --stages=all)")
    if listed and not any(why.startswith(listed) for why in ledger.reasons("dropped")):
        # Dropping nothing is no mistake, but an unknown reason is one.
        known = [*ledger.stages, "source", *ledger.reasons("dropped")]
        text = f"--list={listed}: nothing is dropped for that"
        if not any(stage.startswith(listed) or listed.startswith(f"{stage}:") for stage in known):
            raise InputError(f"{text}; stages and reasons: {'; '.join(known)}")
        screen.print(text)
    streams.print_files(screen, [*written, *([] if listed is None else [path])])

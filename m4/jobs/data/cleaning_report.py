"""`m4 data cleaning_report`: reports what cleaning drops and why; nothing is tokenized."""

import argparse
from typing import TYPE_CHECKING

from m4.jobs import command
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.experiment import Experiment

EXAMPLE = "m4 data cleaning_report --gin_file=gin_configs/demo.gin --stages=all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    parser.add_argument(
        "--stages",
        choices=["configured", "all"],
        default="configured",
        help="run the stages that the config names, or all that there are (default: configured)",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="REASON",
        help="write dropped.jsonl.gz: every dropped pair, or those of a stage or reason",
    )


def run(arguments: argparse.Namespace) -> int:
    with command.opened(arguments, "data", computes=False) as run:
        cleaning_report(run.experiment, arguments.stages, arguments.list)
    return 0


def cleaning_report(experiment: "Experiment", stages: str, list: str | None) -> None:
    """Cleans the corpus and writes data_report.json and data_report.html."""
    from m4.data.cache.cache import fingerprint_of
    from m4.data.cleaning import clean
    from m4.data.inspection import cleaning_report as reports
    from m4.jobs import streams
    from m4.jobs.corpus import everything, fetched, local_data_dir, place_of
    from m4.progress import ProgressBar

    spec = experiment.data.corpus
    cleaning = clean.thorough(spec.cleaning.stages) if stages == "all" else spec.cleaning
    place = place_of(experiment)
    fetched(place, fingerprint_of(spec.identity()), everything)  # its counts, where it is built
    folder = local_data_dir(place)
    path = experiment.folder / "dropped.jsonl.gz"
    with ProgressBar("cleaning", 100, "%") as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.update(round(100 * done / max(total, 1)), what)

        if list is None:
            ledger = reports.clean_corpus(spec, folder, cleaning, progress=progress)
        else:
            with reports.listing(path, list) as on_drop:
                ledger = reports.clean_corpus(spec, folder, cleaning, on_drop, progress)
    written = reports.write_report(experiment.folder, ledger)
    screen = streams.console()
    for table in reports.tables(ledger):
        screen.print(table)
    for line in reports.warnings(ledger):
        screen.print(line, style="yellow")
    if not_run := reports.stages_not_run(ledger):
        screen.print(f"stages not run: {', '.join(not_run)} (clean.Cleaning.stages, --stages=all)")
    if list and not any(why.startswith(list) for why in ledger.reasons("dropped")):
        # A clean corpus is no mistake; a reason that does not exist is one.
        known = [*ledger.stages, "source", *ledger.reasons("dropped")]
        text = f"--list={list}: nothing is dropped for that"
        if not any(stage.startswith(list) or list.startswith(f"{stage}:") for stage in known):
            raise InputError(f"{text}; stages and reasons: {'; '.join(known)}")
        screen.print(text)
    streams.print_files(screen, [*written, *([] if list is None else [path])])

"""`m4 data vocabulary`: measures what the vocabulary makes of each language."""

import argparse

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 data vocabulary --gin_file=gin_configs/demo.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    parser.add_argument(
        "--sentences", type=int, default=2000, help="sentences per language (default: 2000)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints a table of the languages; those that are spelled in bytes stand out."""
    if arguments.sentences < 1:
        raise InputError(f"--sentences={arguments.sentences}: must be at least 1")
    with command.opened(arguments, "data", computes=False) as run:
        from m4.data.inspection import vocabulary_report
        from m4.jobs.corpus import open_corpus

        rows = vocabulary_report.measure(open_corpus(run.experiment), arguments.sentences)
    screen = streams.console()
    screen.print(vocabulary_report.table(rows))
    if any(row.byte_share > vocabulary_report.MANY_BYTES for row in rows):
        remedies = "CorpusSpec.vocabulary_size, CorpusSpec.vocabulary_temperature"
        screen.print(f"bytes make long sentences: {remedies}", style="yellow")

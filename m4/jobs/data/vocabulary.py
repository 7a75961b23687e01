"""`m4 data vocabulary`: measures what the vocabulary makes of each language."""

import argparse
import sys
from typing import TYPE_CHECKING

from m4.jobs import command
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.experiment import Experiment

EXAMPLE = "m4 data vocabulary --gin_file=gin_configs/demo.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_run(parser)
    command.add_config(parser)
    parser.add_argument(
        "--sentences", type=int, default=2000, help="sentences per language (default: 2000)"
    )
    parser.add_argument(
        "--warn_above",
        type=float,
        default=0.01,
        help="share of bytes among the pieces from which a language is named (default: 0.01)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    with command.opened(arguments, "data", computes=False) as run:
        vocabulary(run.experiment, arguments.sentences, arguments.warn_above)
    return 0


def vocabulary(experiment: "Experiment", sentences: int = 2000, warn_above: float = 0.01) -> None:
    """Writes vocabulary_report.json into MODEL_DIR."""
    if sentences < 1 or not 0.0 <= warn_above <= 1.0:
        raise InputError(
            f"--sentences={sentences} --warn_above={warn_above}: must be at least 1, and a share "
            "between 0 and 1"
        )
    from m4.data.inspection import vocabulary_report
    from m4.jobs import streams
    from m4.jobs.corpus import open_corpus

    cache = open_corpus(experiment)
    rows = vocabulary_report.measure(cache, sentences)
    screen = streams.console()
    screen.print(vocabulary_report.table(rows))
    folder = experiment.folder
    streams.print_files(screen, [vocabulary_report.write(folder, cache, rows, warn_above)])
    if worst := vocabulary_report.spelled_out(rows, warn_above):
        named = ", ".join(f"{row.language} {row.byte_share:.1%}" for row in worst[:10])
        more = f" and {len(worst) - 10} more" if len(worst) > 10 else ""
        print(
            f"more than {warn_above:.1%} of the pieces are bytes: {named}{more} "
            "(CorpusSpec.vocabulary_size, CorpusSpec.vocabulary_temperature)",
            file=sys.stderr,
        )

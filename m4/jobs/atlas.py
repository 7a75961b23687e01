"""`m4 atlas`: which language goes to which expert, as tables and a picture."""

import argparse
from pathlib import Path

from m4.jobs import command, streams

EXAMPLE = "m4 atlas runs/demo --split=test"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_run_folder(parser)
    text = "count choices of training, or of the test sets and their translations (default: train)"
    parser.add_argument("--split", choices=["train", "test"], default="train", help=text)
    text = "file of the picture (default: RUN/atlas.png)"
    parser.add_argument("--output", type=Path, metavar="FILE.png", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Prints and draws the atlas."""
    streams.require_output()
    from m4.eval.report import atlas
    from m4.storage.local_copy import fetched

    folder = fetched(command.run_of(arguments))
    atlas.show(folder, arguments.split, streams.console(), arguments.output)

"""`m4 new`: looks at a folder of sentence pairs and writes a gin file for it."""

import argparse

EXAMPLE = "m4 new my_corpus --out=mine.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("folder", help="a folder of sentence pairs of English and other languages")
    parser.add_argument(
        "--out", metavar="FILE", help="the gin file (default: <name of the folder>.gin)"
    )
    parser.add_argument("--yes", action="store_true", help="take the defaults and ask nothing")


def run(arguments: argparse.Namespace) -> int:
    """Writes the gin file; returns the exit status."""
    from m4.jobs.new.new import new

    new(arguments.folder, arguments.out, arguments.yes)
    return 0

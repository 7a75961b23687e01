"""`m4 new`: looks at a folder of sentence pairs and writes a complete gin file for it."""

import argparse

from m4.settings import InputError

EXAMPLE = "m4 new my_corpus --out=mine.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="folder with sentence pairs")
    parser.add_argument("--out", metavar="FILE", help="gin file to write (default: FOLDER.gin)")
    parser.add_argument("--yes", action="store_true", help="take the defaults instead of asking")
    text = "also write a config that continues from this model: a run, or a model in Hugging "
    text += "Face's layout"
    parser.add_argument("--start", metavar="FOLDER", help=text)
    text = "minutes of training, which with the corpus and the number of cores decide the model "
    text += "(default: 60)"
    parser.add_argument("--minutes", type=int, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Writes the gin file."""
    from m4.jobs.new_config import write_config

    if arguments.minutes is not None and arguments.minutes < 1:
        raise InputError(f"--minutes={arguments.minutes}: must be 1 or more")
    given = arguments.folder, arguments.out, arguments.yes, arguments.minutes, arguments.start
    write_config(*given)

"""`m4 translate`: translates the arguments, or standard input line by line."""

import argparse
import dataclasses
import gc
import os
import sys
from typing import TYPE_CHECKING

from m4.jobs import command, streams
from m4.settings import InputError, shown

if TYPE_CHECKING:
    from m4.eval.decoding.decode import Translations

EXAMPLE = 'm4 translate runs/demo --to=gl "3 weeks ago"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, run=False)
    parser.add_argument("--to", required=True, help="target language, e.g. gl")
    text = "language of the lines, for a model whose gate is by_direction (default: en)"
    parser.add_argument("--from", dest="source", metavar="xx", help=text)
    text = "run folder (unless --model_dir or --gin_file is given), then lines to translate "
    text += "(default: standard input)"
    parser.add_argument("text", nargs="*", metavar="RUN|TEXT", help=text)
    command.add_flags(parser, "beams")
    text = "write the N best translations of each line"
    parser.add_argument("--n_best", type=int, metavar="N", help=text)
    text = "write a JSON line for each: source, all Decoding.n_best translations, scores"
    parser.add_argument("--json", action="store_true", help=text)
    command.add_flags(parser, "dry_run", "verify")


def run(arguments: argparse.Namespace) -> None:
    """Translates each line."""
    if arguments.text and not (arguments.model_dir or arguments.gin_file):
        run = arguments.model_dir = arguments.text.pop(0)
        if "://" not in run and not os.path.isdir(run):
            said = "no such folder; the first argument is the run"
            raise InputError(f"{shown(run)}: {said}, as `m4 translate RUN --to=gl TEXT`")
    if not arguments.text and "stdin" in streams.closed:
        raise InputError("standard input is closed, and there is no text among the arguments")
    streams.utf8_output()
    if command.dry_run(arguments):
        return
    with command.opened(arguments) as run:
        from m4.eval.decoding.translate import first_text, json_line
        from m4.jobs.decoding.testsets import loaded

        model, _ = loaded(run.experiment, job="m4 translate")
        ready = dataclasses.replace(model, source=arguments.source)
        to, written = arguments.to, first_text if arguments.n_best is None else _all_texts
        written = json_line if arguments.json else written
        if not gc.isenabled():  # `m4.cli.main` turned it off
            gc.freeze()  # everything loaded so far stays
            gc.enable()
        if arguments.text:
            found = ready.candidates(arguments.text, to)
            for line, each in zip(arguments.text, found, strict=True):
                print(written(line, each, to), flush=True)
        else:
            ready.stream(sys.stdin.fileno(), to, sys.stdout, written=written)


def _all_texts(line: str, found: "Translations", to: str) -> str:
    """Returns all translations, one per line, the best first."""
    return "\n".join(found.texts)

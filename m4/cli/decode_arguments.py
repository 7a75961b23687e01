"""The arguments of `m4 decode` for other text than the test sets."""

import argparse
from typing import TYPE_CHECKING

from m4.settings import InputError

if TYPE_CHECKING:
    from m4.jobs.decoding.text import Request


def add_text(job: argparse.ArgumentParser) -> None:
    """Files of text, in the place of a test set."""
    group = job.add_argument_group("any text", "docs/decoding.md")
    group.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="files of lines, .gz and .zst too; folders of them; - is standard input",
    )
    group.add_argument("--to", metavar="xx,yy", help="the languages to translate into, or all")
    group.add_argument("--from", dest="source", metavar="xx", help="the language of the input (en)")
    group.add_argument(
        "--output", help="FILE; for several translations a folder of FILE.xx.txt; - is standard"
    )
    group.add_argument("--overwrite", action="store_true", help="replace translations")


def text_request(parsed: argparse.Namespace) -> "Request | None":
    """What is to be translated; None: a test set. InputError: arguments that do not go together."""
    given = {"--input": parsed.input, "--to": parsed.to, "--output": parsed.output}
    lacking = [name for name, value in given.items() if not value]
    more = {"--from": parsed.source, "--overwrite": parsed.overwrite}
    if len(lacking) == len(given):
        for name, value in more.items():
            if value:
                raise InputError(f"{name}: give --input, --to and --output, too")
        return None
    if lacking:
        raise InputError(f"{', '.join(lacking)}: missing; --input, --to and --output go together")
    for name, value in {"--split": parsed.split, "--compare": parsed.compare}.items():
        if value is not None:
            raise InputError(f"{name}={value}: not with --input")
    from m4.jobs.decoding.text import Request

    targets = [name for name in parsed.to.split(",") if name]
    return Request(parsed.input, targets, parsed.output, parsed.source, parsed.overwrite)

"""`m4 decode`: translates the test sets, or files of text, with the trained model."""

import argparse
from typing import Any

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 decode runs/demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    command.add_flags(parser, "beams")
    command.add_flags(parser, "split", "step", "testset", "dry_run")
    group = parser.add_argument_group("text files", "docs/decoding.md")
    text = "text files, also .gz, .zst, .xz and .bz2, or folders of them; - is standard input"
    group.add_argument("--input", nargs="+", action="extend", metavar="FILE", help=text)
    group.add_argument("--to", metavar="xx,yy", help="languages to translate into, or all")
    text = "language of the input (default: en)"
    group.add_argument("--from", dest="source", metavar="xx", help=text)
    text = "file; for several translations a folder, of FILE.xx.txt; - is standard output"
    group.add_argument("--output", help=text)
    text = "write JSON lines with scores and all Decoding.n_best translations"
    group.add_argument("--json", action="store_true", help=text)
    text = "t5x: write the lines of T5X's inference; for the test sets, in addition and as files "
    text += "of its tasks. tsv: write each line and its translation as a training pair, English "
    text += "first, and what made them in FILE.json"
    group.add_argument("--format", choices=["t5x", "tsv"], help=text)
    group.add_argument("--overwrite", action="store_true", help="replace existing translations")
    command.add_flags(parser, "verify")


def run(arguments: argparse.Namespace) -> None:
    """Translates the test sets or text files."""
    text = text_options(arguments)
    if command.dry_run(arguments):
        return
    if text is not None:
        with command.opened(arguments) as run:
            from m4.jobs.decoding.text import decode_text

            decode_text(run.experiment, **text)
        return
    with command.opened(arguments, "eval" if arguments.step is None else "steps") as run:
        from m4.jobs.decoding.testsets import decode

        t5x = arguments.format == "t5x"
        decode(run.experiment, split=command.split_of(arguments), step=arguments.step, t5x=t5x)
    command.print_next(run, f"eval --testset={arguments.testset}" if arguments.testset else "eval")


def text_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Returns arguments for `decoding.text.decode_text`, or None for a test set."""
    given = {"--input": arguments.input, "--to": arguments.to, "--output": arguments.output}
    missing = [name for name, value in given.items() if not value]
    if len(missing) == len(given):
        for name, value in (
            ("--from", arguments.source), ("--overwrite", arguments.overwrite),
            ("--json", arguments.json), ("--format=tsv", arguments.format == "tsv"),
        ):  # fmt: skip
            if value:
                raise InputError(f"{name}: give --input, --to and --output, too")
        return None
    if arguments.json and arguments.format:
        raise InputError(f"--format={arguments.format}: not with --json, another format")
    if missing:
        raise InputError(f"{', '.join(missing)}: missing; --input, --to and --output go together")
    for name, value in (("--split", arguments.split), ("--testset", arguments.testset)):
        if value is not None:
            raise InputError(f"{name}={value}: not with --input")
    targets = [name for name in arguments.to.split(",") if name]
    if not targets:
        raise InputError(f"--to={arguments.to}: names no language")
    if "-" in arguments.input and "stdin" in streams.closed:
        raise InputError("--input=-: standard input is closed")
    if arguments.output == "-":
        streams.utf8_output()
    return {
        "inputs": arguments.input, "targets": targets, "output": arguments.output,
        "source": arguments.source, "step": arguments.step, "overwrite": arguments.overwrite,
        "form": "json" if arguments.json else arguments.format or "text",
    }  # fmt: skip

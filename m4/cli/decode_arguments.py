"""The arguments of `m4 decode` for other text than the test sets, and for its audit."""

import argparse
from typing import TYPE_CHECKING

from m4.settings import InputError

if TYPE_CHECKING:
    from m4.eval.decoding.testsets import Portion
    from m4.jobs.decoding.text import Request


_SENTENCES = 12  # of each direction in the audit


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
    group.add_argument(
        "--json",
        action="store_true",
        help="lines of JSON, with the scores and all Decoding.n_best translations",
    )
    add_format(group)
    group.add_argument("--overwrite", action="store_true", help="replace translations")


def add_format(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--format",
        choices=["t5x"],
        help="lines of T5X's inference; of the test sets in addition, as files of its tasks",
    )


def add_audit(job: argparse.ArgumentParser) -> None:
    """A comparison of batches and devices."""
    group = job.add_argument_group("audit", "do translations depend on their batch or on devices?")
    group.add_argument(
        "--audit",
        action="store_true",
        help="translate a sample in batches of 1, 8 and 64, shuffled and over a mesh, and count "
        "the tokens that change; exit status 1 if there are any",
    )
    group.add_argument("--sentences", type=int, help=f"of each direction ({_SENTENCES})")
    group.add_argument("--directions", help="of these alone, en-gl,gl-en (all)")


def audit_portion(parsed: argparse.Namespace) -> "Portion | None":
    """The sentences of the audit; None: there is none. InputError: arguments that cannot be."""
    if not parsed.audit:
        for name in ("sentences", "directions"):
            if getattr(parsed, name) is not None:
                raise InputError(f"--{name}: give --audit, too")
        return None
    for name in ("input", "to", "output", "source", "compare", "format"):
        if getattr(parsed, name) is not None:
            raise InputError(f"--{'from' if name == 'source' else name}: not with --audit")
    if parsed.sentences is not None and parsed.sentences < 1:
        raise InputError(f"--sentences={parsed.sentences}: must be 1 or more")
    from m4.eval.decoding.testsets import Portion

    directions = tuple(filter(None, (parsed.directions or "").split(",")))
    return Portion(parsed.split or "test", parsed.sentences or _SENTENCES, directions)


def text_request(parsed: argparse.Namespace) -> "Request | None":
    """What is to be translated; None: a test set. InputError: arguments that do not go together."""
    given = {"--input": parsed.input, "--to": parsed.to, "--output": parsed.output}
    lacking = [name for name, value in given.items() if not value]
    more = {"--from": parsed.source, "--overwrite": parsed.overwrite, "--json": parsed.json}
    if len(lacking) == len(given):
        for name, value in more.items():
            if value:
                raise InputError(f"{name}: give --input, --to and --output, too")
        return None
    if parsed.json and parsed.format:
        raise InputError(f"--format={parsed.format}: not with --json, another format")
    if lacking:
        raise InputError(f"{', '.join(lacking)}: missing; --input, --to and --output go together")
    for name, value in {"--split": parsed.split, "--compare": parsed.compare}.items():
        if value is not None:
            raise InputError(f"{name}={value}: not with --input")
    from m4.eval.text.inputs import standard
    from m4.jobs.decoding.text import Request

    targets = [name for name in parsed.to.split(",") if name]
    if not targets:
        raise InputError(f"--to={parsed.to}: names no language")
    return Request(
        [standard("--input", name) for name in parsed.input],
        targets,
        standard("--output", parsed.output),
        parsed.source,
        overwrite=parsed.overwrite,
        format="json" if parsed.json else parsed.format or "text",
    )

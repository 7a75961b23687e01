"""`m4 score_files`: scores any files of translations, with intervals and failure rates."""

import argparse
import functools
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from m4.jobs import command, streams
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.eval.metrics import Metric

EXAMPLE = "m4 score_files test.en system.gl test.gl --to=gl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="sources, one per line")
    parser.add_argument("hypothesis", type=Path, metavar="HYP", help="their translations")
    parser.add_argument("references", type=Path, nargs="+", metavar="REF", help="references")
    parser.add_argument("--to", required=True, metavar="xx", help="target language")
    text = "source language (default: en)"
    parser.add_argument("--from", dest="language", default="en", metavar="xx", help=text)
    command.add_flags(parser, "metrics")
    text = "also score spBLEU, on the pieces of this SentencePiece model"
    parser.add_argument("--spbleu", metavar="FILE", help=text)
    text = "also score with this command (docs/evaluation.md); may be repeated"
    parser.add_argument("--scorer", action="append", default=[], metavar="NAME=COMMAND", help=text)
    text = "print rows of scores.jsonl and rates.jsonl"
    parser.add_argument("--json", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Scores the files."""
    metrics = command.metrics_of(arguments) + _more_metrics(arguments)
    from m4.data.cleaning.language_id import Py3langid, installed
    from m4.eval.scoring.levels import ResourceLevels
    from m4.eval.scoring.rates import rates, table
    from m4.eval.scoring.score import Decode, System, measured_of, score_rows, score_table
    from m4.eval.text import aligned_lines

    streams.utf8_output()
    paths = [arguments.source, arguments.hypothesis, *arguments.references]
    name, direction = arguments.hypothesis.name, f"{arguments.language}-{arguments.to}"
    decodes = [
        Decode(source, references[0], hypothesis, references if len(references) > 1 else ())
        for source, hypothesis, *references in zip(*aligned_lines(*paths), strict=True)
    ]
    if not decodes:
        raise InputError(f"{arguments.source}: no lines")
    system = System(name, arguments.hypothesis.parent)
    measured = measured_of([system], {(name, direction): decodes}, metrics)
    scores = score_rows(measured, {})
    failures = rates(measured, Py3langid() if installed() else None)
    if arguments.json:
        for row in (*scores, *failures):
            print(json.dumps(row, ensure_ascii=False))
        return
    terminal = streams.console()
    terminal.print(score_table(scores))
    for metric, signature in {row["metric"]: row["signature"] for row in scores}.items():
        print(f"{metric}: {signature}")
    terminal.print(table(failures, ResourceLevels(min_test_sentences=0)))


def _more_metrics(arguments: argparse.Namespace) -> list["Metric"]:
    found: list[Metric] = []
    if arguments.spbleu:
        from m4.eval.metrics.spbleu import spbleu

        found.append(functools.partial(spbleu, model=arguments.spbleu))
    for scorer in arguments.scorer:
        from m4.eval.metrics.external import External

        name, equals, words = scorer.partition("=")
        if not equals or not words.strip():
            raise InputError(f"--scorer={scorer}: must be NAME=COMMAND")
        found.append(External(shlex.split(words), name))
    return found

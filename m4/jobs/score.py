"""`m4 score`: log-probabilities of the test sets' references, or of given translations."""

import argparse
import json
from pathlib import Path

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 score runs/demo --split=dev"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    command.add_flags(parser, "split", "step", "dry_run")
    group = parser.add_argument_group("files", "score pairs of lines instead of the run's test set")
    group.add_argument("--source", type=Path, metavar="FILE", help="sources, one per line")
    group.add_argument("--target", type=Path, metavar="FILE", help="their translations")
    group.add_argument("--to", help="target language, e.g. gl")
    text = "source language, for a model whose gate is by_direction (default: en)"
    group.add_argument("--from", dest="language", metavar="xx", help=text)
    command.add_flags(parser, "verify")


def run(arguments: argparse.Namespace) -> None:
    """Scores given translations."""
    files = any((arguments.source, arguments.target, arguments.to))
    if files:
        if not all((arguments.source, arguments.target, arguments.to)):
            raise InputError("give --source, --target and --to together")
        for name in ("split", "step"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name}: not with --source, which the latest model scores")
        streams.utf8_output()
    if command.dry_run(arguments):
        return
    kinds = () if files else ("eval" if arguments.step is None else "steps",)
    with command.opened(arguments, *kinds) as run:
        from m4.jobs.decoding.testsets import score, score_files
        from m4.parallel import distributed

        if files and distributed.is_distributed():
            raise InputError("one process scores files; several can share `m4 score` of a test set")
        if files:
            given = arguments.source, arguments.target, arguments.to, arguments.language
            for row in score_files(run.experiment, *given):
                print(json.dumps(row, ensure_ascii=False), flush=True)
            return
        score(run.experiment, split=arguments.split or "test", step=arguments.step)

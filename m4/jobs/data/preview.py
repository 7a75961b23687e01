"""`m4 data preview`: shows how often each language would be seen in training."""

import argparse
import json
import math

from m4.jobs import command, streams
from m4.settings import InputError

_MOST_DIRECTIONS = 150  # width of a matrix that fits a terminal
EXAMPLE = "m4 data preview --gin_file=gin_configs/demo.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    text = "warn of languages with more epochs than this (default: 16)"
    parser.add_argument("--most_epochs", type=float, default=16.0, help=text)


def run(arguments: argparse.Namespace) -> None:
    """Prints how often each language would be seen, and writes data_preview.json into MODEL_DIR."""
    if not 0 < (most := arguments.most_epochs) < math.inf:
        raise InputError(f"--most_epochs={most}: must be above 0")
    with command.opened(arguments, "data", computes=False) as run:
        from m4.build import build
        from m4.data.inspection import preview as previews
        from m4.data.languages import title_of
        from m4.jobs.corpus import arrays, open_corpus
        from m4.storage.files import write_text

        data, steps = run.experiment.data, run.experiment.training.total_steps
        cache = open_corpus(run.experiment, arrays)
        seen = build(run.experiment, cache).stream.examples_seen(steps)
        drawn = previews.drawn_of(cache, seen)
        name = getattr(data.sampler, "__name__", type(data.sampler).__name__)
        made = {
            "total_steps": steps, "sampler": name, "sample_by": data.sample_by, "most_epochs": most,
            "repeated_more": previews.repeated_more_than(drawn, most), "directions": seen,
            "pairs": {key: {"name": title_of(key), **one._asdict()} for key, one in drawn.items()},
        }  # fmt: skip
        path = run.folder / "data_preview.json"
        write_text(path, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    screen = streams.console()
    screen.print(f"{name}, by {data.sample_by}, {steps:,} steps", style="italic")
    screen.print(previews.table(cache, drawn, data.sample_by, most))
    if any("-" in code for code in drawn) and len(seen) <= _MOST_DIRECTIONS:
        screen.print(previews.matrix(seen))
    for line in previews.warnings(drawn, most):
        screen.print(line, style="yellow")
    streams.print_files(screen, [path])

"""`m4 data preview`: shows how often each language would be seen in training."""

import argparse
import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING

from m4.jobs import command
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.data.samplers import Sampler
    from m4.experiment import Experiment

EXAMPLE = "m4 data preview --gin_file=gin_configs/demo.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_run(parser)
    command.add_config(parser)
    parser.add_argument(
        "--temperatures",
        default="1,2,3,5,inf",
        help="temperatures to compare the sampler with (default: 1,2,3,5,inf)",
    )
    parser.add_argument(
        "--most_epochs",
        type=float,
        default=16.0,
        help="warn of languages that are repeated more often (default: 16)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    with command.opened(arguments, "data", computes=False) as run:
        preview(run.experiment, arguments.temperatures, arguments.most_epochs)
    return 0


def preview(experiment: "Experiment", temperatures: str, most_epochs: float) -> None:
    """Prints how often each language would be seen, and writes data_preview.json into MODEL_DIR."""
    from m4.build import training_stream
    from m4.data.inspection import preview as previews
    from m4.data.inspection.preview import Column, drawn_of
    from m4.jobs import streams
    from m4.jobs.corpus import arrays, open_corpus
    from m4.storage.files import write_text

    samplers = {"configured": experiment.data.sampler, **_temperatures(temperatures)}
    if not 0 < most_epochs < math.inf:
        raise InputError(f"--most_epochs={most_epochs}: must be above 0")
    cache = open_corpus(experiment, arrays)
    steps, columns = experiment.training.total_steps, []
    for name, sampler in samplers.items():
        data = dataclasses.replace(experiment.data, sampler=sampler)
        try:
            stream = training_stream(experiment.training, data, cache)
        except ValueError as error:
            if not columns:
                raise
            # A share that is too small to draw; the other samplers are still shown.
            columns.append(Column(name, {}, str(error)))
        else:
            columns.append(Column(name, drawn_of(cache, stream, steps)))
    sampler = experiment.data.sampler
    name = getattr(sampler, "__name__", type(sampler).__name__)
    pairs, tokens = previews.corpus_sizes(cache)
    seen = previews.Preview(steps, name, experiment.data.sample_by, pairs, tokens, columns)
    made = previews.as_json(seen, most_epochs)
    path = experiment.folder / "data_preview.json"
    write_text(path, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    screen = streams.console()
    screen.print(previews.table(seen, most_epochs))
    for line in previews.warnings(seen, most_epochs):
        screen.print(line, style="yellow")
    streams.print_files(screen, [path])


def _temperatures(text: str) -> "dict[str, Sampler]":
    """Returns the samplers of a list of temperatures: '1,5,inf' has T=1, T=5 and T=∞."""
    from m4.data.samplers.temperature import temperature
    from m4.data.samplers.uniform import uniform

    found: dict[str, Sampler] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not value >= 1:
            raise InputError(
                f"--temperatures={text}: {part!r} must be a number from 1 on, or inf; "
                "with commas between them"
            )
        if value == math.inf:
            found["T=∞"] = uniform
        else:
            found[f"T={value:g}"] = functools.partial(temperature, temperature=value)
    return found

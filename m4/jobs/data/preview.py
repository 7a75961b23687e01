"""`m4 data preview`: how often each language would be seen in training."""

import argparse
import dataclasses
import functools
import json
from typing import TYPE_CHECKING

from m4.jobs import command
from m4.settings import InputError

if TYPE_CHECKING:
    from m4.data.samplers import Sampler
    from m4.experiment import Experiment

EXAMPLE = "m4 data preview --gin_file=gin_configs/demo.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
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
    with command.experiment_of(arguments) as (experiment, config):
        from m4.jobs.claim import claimed

        with claimed(experiment, config, "data"):
            preview(experiment, arguments.temperatures, arguments.most_epochs)
    return 0


def preview(experiment: "Experiment", temperatures: str, most_epochs: float) -> None:
    """How often each language would be seen in training, with the sampler and at temperatures.

    temperatures: numbers from 1 on or inf, separated by commas, to compare with. most_epochs:
    languages that the sampler repeats more often are warned of. Writes data_preview.json, .html,
    .png and .pdf.
    """
    from m4.data.inspection import preview as previews
    from m4.data.inspection.preview import Column, drawn_of
    from m4.data.samplers.temperature import temperature
    from m4.data.samplers.uniform import uniform
    from m4.eval.report import preview_page
    from m4.jobs import prepare
    from m4.jobs.corpus import arrays, open_corpus
    from m4.progress import ProgressBar
    from m4.storage.files import write_text

    others = _temperatures(temperatures)
    if not 0 < most_epochs < float("inf"):
        raise InputError(f"--most_epochs={most_epochs}: must be above 0")
    cache = open_corpus(experiment, arrays)
    columns, steps = [], experiment.training.total_steps
    with ProgressBar("preview", 1 + len(others), "samplers") as bar:
        stream = prepare.training_stream(experiment, cache)
        columns.append(Column("configured", drawn_of(cache, stream, steps)))
        for name, value in others.items():
            bar.update(len(columns), name)
            sampler: Sampler = functools.partial(temperature, temperature=value)
            if value == float("inf"):
                sampler = uniform
            try:
                data = dataclasses.replace(experiment.data, sampler=sampler)
                other = dataclasses.replace(experiment, data=data)
                stream = prepare.training_stream(other, cache)
            except (
                ValueError
            ) as error:  # a share that is too small to draw; the others are still shown
                columns.append(Column(name, {}, str(error)))
                continue
            columns.append(Column(name, drawn_of(cache, stream, steps)))
        bar.update(len(columns))
    name = getattr(experiment.data.sampler, "__name__", type(experiment.data.sampler).__name__)
    pairs, tokens = previews.corpus_sizes(cache)
    seen = previews.Preview(steps, name, experiment.data.sample_by, pairs, tokens, columns)
    made = previews.as_json(seen, most_epochs)
    path = prepare.run_folder(experiment) / "data_preview.json"
    write_text(path, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    files = [path, *preview_page.write(seen, most_epochs, prepare.run_folder(experiment))]
    screen = prepare.console()
    screen.print(previews.table(seen, most_epochs))
    for line in previews.warnings(seen, most_epochs):
        screen.print(line, style="yellow", markup=False)
    prepare.print_files(screen, files)


def _temperatures(text: str) -> dict[str, float]:
    """'1,5,inf' -> {"T=1": 1.0, "T=5": 5.0, "T=∞": inf}; empty text: none."""
    found = {}
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
        found["T=∞" if value == float("inf") else f"T={value:g}"] = value
    return found

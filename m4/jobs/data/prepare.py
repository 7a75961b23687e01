"""`m4 data prepare`: builds the corpus alone, without accelerators, on one machine or on many."""

import argparse
import contextlib
import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from m4.jobs import command
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError

EXAMPLE = "m4 data prepare --gin_file=gin_configs/demo.gin"
_BEAM_RUNNERS = ("direct", "prism", "flink", "spark", "dataflow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    parser.add_argument(
        "--runner",
        choices=("local", *_BEAM_RUNNERS),
        default="local",
        help="who prepares the corpus, which is the same: processes of this machine or a runner of "
        "Apache Beam (make beam); direct is Beam on this machine (default: local)",
    )
    text = "options of Apache Beam, as '--project=P --region=R --temp_location=gs://B/tmp'"
    parser.add_argument("--beam_options", default="", metavar="OPTIONS", help=text)
    text = "price of a CPU hour, for the cost that is printed before Beam starts"
    parser.add_argument("--cpu_hour_price", type=float, metavar="DOLLARS", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Builds the corpus in MODEL_DIR/data or Data.data_dir, or checks what is there."""
    if arguments.runner == "local" and (arguments.beam_options or arguments.cpu_hour_price):
        raise InputError("--beam_options and --cpu_hour_price need a --runner of Beam")
    if not 0 <= (arguments.cpu_hour_price or 0) < math.inf:
        raise InputError(f"--cpu_hour_price={arguments.cpu_hour_price}: must be 0 or above")
    with command.experiment_of(arguments) as (experiment, config):
        from m4.data.beam import Engine, cost
        from m4.data.cache.cache import Cache, fingerprint_of
        from m4.jobs import corpus
        from m4.jobs.open_run import open_run
        from m4.storage.files import check_output
        from m4.storage.local_copy import local_place
        from m4.storage.objects import is_address

        spec, place = experiment.data.corpus, corpus.place_of(experiment)
        build: Callable[..., Cache] | None = None
        stack = contextlib.ExitStack()
        if arguments.runner != "local":
            workers = spec.workers or len(available_cpus())
            try:
                options = shlex.split(arguments.beam_options)
            except ValueError as error:  # an open quote
                raise InputError(f"--beam_options={arguments.beam_options}: {error}") from None
            engine, price = Engine(arguments.runner, options, workers), arguments.cpu_hour_price

            def by_engine(folder: Path, identity: Mapping[str, Any], **more: Any) -> Cache:
                name = fingerprint_of(identity)
                check_output(folder / name, f"data_dir = {place}")
                engine.check(spec.opened_source, spec.cleaning)
                stack.enter_context(engine.opened(f"{place.rstrip('/')}/.beam"))
                print(cost(spec, price))
                return spec.build(folder, identity=identity, engine=engine, **more)

            build = by_engine
        with stack:
            if experiment.data.data_dir is None:
                opened = open_run(experiment, config, "data", computes=False)
                experiment = stack.enter_context(opened).experiment
            name = corpus.built(experiment, build)
            here = corpus.place_of(experiment)
            cache = Cache(local_place(here) / name, spec.mixture)
            if not is_address(here):
                cache.verify()
            print(f"{place}: {corpus.size_of(cache)}, corpus {name}")

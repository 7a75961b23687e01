"""`m4 data prepare`: builds the corpus alone, without accelerators, on one machine or on many."""

import argparse
import contextlib
import shlex

from m4.jobs import command
from m4.parallel.platform.hardware import available_cpus
from m4.settings import InputError, counted

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
    parser.add_argument(
        "--beam_options",
        default="",
        metavar="OPTIONS",
        help="options of Apache Beam, as '--project=P --region=R --temp_location=gs://B/tmp'",
    )
    parser.add_argument(
        "--cpu_hour_price",
        type=float,
        metavar="DOLLARS",
        help="price of a CPU hour, for the cost that is printed before Beam starts",
    )


def run(arguments: argparse.Namespace) -> int:
    """Builds the corpus in MODEL_DIR/data or Data.data_dir, or checks what is there."""
    if arguments.runner == "local" and (arguments.beam_options or arguments.cpu_hour_price):
        raise InputError("--beam_options and --cpu_hour_price need a --runner of Beam")
    with command.experiment_of(arguments) as (experiment, config):
        from m4.data.beam import Engine
        from m4.jobs.corpus import opened_or_built, place_of
        from m4.jobs.open_run import open_run

        engine = None
        if arguments.runner != "local":
            workers = experiment.data.corpus.workers or len(available_cpus())
            options = shlex.split(arguments.beam_options)
            engine = Engine(arguments.runner, options, workers, arguments.cpu_hour_price)
        with contextlib.ExitStack() as stack:
            built = experiment
            if experiment.data.data_dir is None:
                opened = open_run(experiment, config, "data", computes=False)
                built = stack.enter_context(opened).experiment
            cache = opened_or_built(built, engine)
        names = cache.language_pairs()
        pairs = sum(cache.size(name, "train") for name in names)
        print(
            f"{place_of(experiment)}: {counted(pairs, 'training pair')} in "
            f"{counted(len(names), 'pair')} of languages, "
            f"corpus {cache.fingerprint}"
        )
    return 0

"""`m4 extract`: makes a run folder with the experts and pieces that some directions need."""

import argparse
from pathlib import Path

from m4.jobs import command
from m4.settings import InputError

EXAMPLE = "m4 extract runs/demo --directions=en-gl,gl-en --output=runs/small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    parser.add_argument("--directions", required=True, help="directions to keep, e.g. gl-en,pt-en")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="the new run's folder")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--keep", type=int, metavar="N", help="experts to keep in each layer")
    text = "keep the experts that get this share of the tokens' choices (default: 0.95; for a gate "
    text += "by task, all that its tasks choose)"
    group.add_argument("--keep_share", type=float, metavar="SHARE", help=text)
    command.add_flags(parser, "split", "step", "sentences", "verify")


def run(arguments: argparse.Namespace) -> None:
    """Extracts a smaller model from a run into a new folder."""
    sentences, directions = command.portion_of(arguments)
    if not directions:
        raise InputError(f"--directions={arguments.directions}: names no direction")
    if "://" in arguments.output:
        raise InputError(f"--output={arguments.output}: must be a folder on this machine")
    output = str(Path(arguments.output).absolute())
    if Path(output).exists():
        raise InputError(f"--output={output}: is there already")
    with command.experiment_of(arguments) as (experiment, config):
        from m4.build import build
        from m4.eval.decoding.testsets import Portion
        from m4.jobs.checkpoints import extract
        from m4.jobs.open_run import open_run
        from m4.model.transformer import abstract_variables

        tested = Portion(arguments.split or "test", sentences, directions)
        asked = (directions, arguments.keep, arguments.keep_share)
        extract.check(experiment, arguments.keep, arguments.keep_share)
        with open_run(experiment, config) as run:
            part = extract.chosen(run.experiment, *asked, arguments.step)
            more = extract.bindings(config, part, directions, output)
            made = command.read_config(arguments, more, output)
            abstract_variables(build(made.experiment(), None).model)  # too few experts for its gate
            with open_run(made.experiment(), made, "train", computes=False) as small:
                for line in extract.extract(part, run.address, small.experiment, tested):
                    print(line, flush=True)

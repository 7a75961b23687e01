"""`m4 eval`: scores the test sets, translated first if needed, or checkpoint by checkpoint."""

import argparse
from typing import Any

from m4.jobs import command
from m4.settings import InputError

EXAMPLE = "m4 eval runs/demo --watch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    command.add_flags(parser, "beams")
    command.add_flags(parser, "split", help="sentences to use (default: test; dev with --watch)")
    command.add_flags(parser, "step", "testset", "dry_run", "sentences")
    parser.add_argument(
        "--zero_shot", nargs="?", const="all", metavar="N|DIRECTIONS",
        help="translate untrained directions, directly and through English: all, a fixed sample "
        "of N, or these, such as fr-wo,wo-fr; writes zero_shot/report.html",
    )  # fmt: skip
    group = parser.add_argument_group("by checkpoint", "writes scores_by_step.jsonl and a plot")
    text = "score each new checkpoint until training has ended"
    group.add_argument("--watch", action="store_true", help=text)
    group.add_argument("--steps", help="score these checkpoints, such as 1000,2000, or all")
    command.add_flags(group, "directions")
    group.add_argument("--seconds", type=float, help="interval of --watch (default: 30)")
    command.add_flags(parser, "verify")


def run(arguments: argparse.Namespace) -> None:
    """Scores the model, once or checkpoint by checkpoint."""
    followed = follow_options(arguments)
    if command.dry_run(arguments):
        return
    by_step = arguments.step is not None or followed is not None
    with command.opened(arguments, "steps" if by_step else "eval") as run:
        if followed is not None:
            from m4.jobs.decoding.evaluate import follow

            follow(run.experiment, **followed)
            return
        of = {"split": command.split_of(arguments), "step": arguments.step,
              "sentences": command.portion_of(arguments)[0]}  # fmt: skip
        if arguments.zero_shot is not None:
            from m4.jobs.decoding.zero_shot import evaluate_zero_shot

            evaluate_zero_shot(run.experiment, arguments.zero_shot, **of)
            return
        from m4.jobs.decoding.evaluate import evaluate

        evaluate(run.experiment, **of)


def follow_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the arguments of `decoding.evaluate.follow`, or None to score one checkpoint."""
    if not (arguments.watch or arguments.steps):
        for name in ("directions", "seconds"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name}: give --watch or --steps, too")
        return None
    for name in ("step", "zero_shot"):
        value = getattr(arguments, name)
        if value is not None:
            raise InputError(f"--{name}={value}: not with --watch or --steps")
    if arguments.watch and arguments.steps:
        raise InputError(f"--steps={arguments.steps}: --watch scores all; give one of them")
    steps, seconds = None, None
    if arguments.watch:
        seconds = 30.0 if arguments.seconds is None else arguments.seconds
        if not 0 < seconds < 1e6:
            raise InputError(f"--seconds={seconds}: must be above 0")
    elif arguments.seconds is not None:
        raise InputError(f"--seconds={arguments.seconds}: only with --watch")
    elif arguments.steps != "all":
        steps = command.steps_of(arguments.steps)
    sentences, directions = command.portion_of(arguments)
    return {
        "split": command.split_of(arguments, "dev" if arguments.watch else "test"),
        "sentences": sentences, "directions": directions, "steps": steps, "seconds": seconds,
    }  # fmt: skip

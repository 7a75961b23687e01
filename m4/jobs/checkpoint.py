"""`m4 checkpoint`: looks at the checkpoints of a run, or at a pretrained model, or changes them."""

import argparse
from pathlib import Path

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 checkpoint verify runs/demo"
# Argument -> what takes it.
_TAKERS = {"dtype": ["convert"], "weights": ["convert"], "corpus": ["trim"],
           "output": ["convert", "trim", "inspect"]}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["list", "verify", "inspect", "convert", "trim"],
        help="list: steps; verify: their SHA-256; inspect: arrays, norms, values that are not "
        "finite, or of a pretrained model (Hugging Face's layout) a gin file that begins from it; "
        "convert: write the parameters as a file or a separate run; trim: a pretrained model "
        "without the pieces that a corpus does not use",
    )
    command.add_run_folder(parser)
    parser.add_argument(
        "--step", type=int, help="(default: all; to inspect and convert the last whole one)"
    )
    group = parser.add_argument_group("convert, trim and inspect")
    group.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="type of the parameters (default: as it is)",
    )
    group.add_argument(
        "--output",
        type=Path,
        help="FILE.safetensors, or a folder: a run that translates, the trimmed model; of inspect "
        "the gin file",
    )
    group.add_argument(
        "--corpus", type=Path, metavar="PATH", help="text file or folder whose pieces trim keeps"
    )
    group.add_argument(
        "--weights",
        type=Path,
        metavar="FILE.safetensors",
        help="take these arrays instead of the run's",
    )


def run(arguments: argparse.Namespace) -> int:
    """Looks at checkpoints; returns the exit status, 1 where one is damaged."""
    streams.require_output()
    what, folder = arguments.what, command.run_of(arguments)
    for name, takers in _TAKERS.items():
        value = getattr(arguments, name)
        if value is not None and what not in takers:
            raise InputError(f"--{name}={value}: only with {' or '.join(takers)}, not {what}")
    from m4.jobs.checkpoints import pretrained
    from m4.jobs.checkpoints.checkpoint import checkpoint

    if what == "trim":
        for name in ("corpus", "output"):
            if getattr(arguments, name) is None:
                raise InputError(f"--{name}: must be given, to trim")
        print(pretrained.trim(folder, arguments.corpus, arguments.output))
        return 0
    if what == "inspect" and (said := pretrained.inspect(folder, arguments.output)) is not None:
        print(said)
        return 0
    given = (arguments.output, arguments.dtype, arguments.weights)
    return 0 if checkpoint(what, folder, arguments.step, streams.console(), *given) else 1

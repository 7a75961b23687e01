"""`m4 checkpoint`: inspects, verifies or converts checkpoints and pretrained models."""

import argparse
from pathlib import Path

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 checkpoint verify runs/demo"
# Argument -> actions that take it.
_TAKERS = {"dtype": ["convert"], "weights": ["convert"], "corpus": ["trim"],
           "output": ["convert", "trim", "inspect"]}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "list: show steps; verify: compare SHA-256; inspect: show arrays, norms and non-finite "
    text += "values, or, for a pretrained model in Hugging Face's layout, a gin file that begins "
    text += "from it; convert: write the parameters as a file or a separate run; trim: write a "
    text += "pretrained model without the pieces that a corpus does not use"
    what = ["list", "verify", "inspect", "convert", "trim"]
    parser.add_argument("what", choices=what, help=text)
    command.add_run_folder(parser)
    text = "step to use (default: all; for inspect and convert the last complete one)"
    parser.add_argument("--step", type=int, help=text)
    group = parser.add_argument_group("convert, trim and inspect")
    text = "type of the parameters that convert writes (default: unchanged)"
    group.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help=text)
    text = "convert: FILE.safetensors, or the folder of a run that translates; trim: the new "
    text += "model's folder; inspect: the gin file"
    group.add_argument("--output", type=Path, help=text)
    text = "text file or folder; trim keeps its pieces"
    group.add_argument("--corpus", type=Path, metavar="PATH", help=text)
    text = "convert with these arrays instead of the run's"
    group.add_argument("--weights", type=Path, metavar="FILE.safetensors", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the action; returns the exit status, 1 if a checkpoint is damaged."""
    streams.require_output()
    what, folder = arguments.what, command.run_of(arguments)
    for name, takers in _TAKERS.items():
        value = getattr(arguments, name)
        if value is not None and what not in takers:
            raise InputError(f"--{name}={value}: only with {' or '.join(takers)}, not {what}")
    for name in {"trim": ("corpus", "output"), "convert": ("output",)}.get(what, ()):
        if getattr(arguments, name) is None:
            raise InputError(f"--{name}: must be given, to {what}")
    from m4.jobs.checkpoints import checkpoint, pretrained

    step, output, console = arguments.step, arguments.output, streams.console()
    if what in ("list", "verify"):
        return 0 if checkpoint.verify(folder, step, console, full=what == "verify") else 1
    if what == "trim":
        said = pretrained.trim(folder, arguments.corpus, output)
    elif what == "convert":
        said = checkpoint.convert(folder, step, output, arguments.dtype, arguments.weights)
    elif (said := pretrained.inspect(folder, output)) is None:
        return 0 if checkpoint.inspect(folder, step, console) else 1
    print(said)
    return 0

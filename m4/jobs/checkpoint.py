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
    text = "list: steps; verify: their SHA-256; inspect: arrays, norms, values that are not "
    text += "finite, or of a pretrained model (Hugging Face's layout) a gin file that begins from "
    text += "it; convert: write the parameters as a file or a separate run; trim: a pretrained "
    text += "model without the pieces that a corpus does not use"
    what = ["list", "verify", "inspect", "convert", "trim"]
    parser.add_argument("what", choices=what, help=text)
    command.add_run_folder(parser)
    text = "(default: all; to inspect and convert the last whole one)"
    parser.add_argument("--step", type=int, help=text)
    group = parser.add_argument_group("convert, trim and inspect")
    text = "type of the parameters (default: as it is)"
    group.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help=text)
    text = "FILE.safetensors, or a folder: a run that translates, the trimmed model; of inspect "
    text += "the gin file"
    group.add_argument("--output", type=Path, help=text)
    text = "text file or folder whose pieces trim keeps"
    group.add_argument("--corpus", type=Path, metavar="PATH", help=text)
    text = "take these arrays instead of the run's"
    group.add_argument("--weights", type=Path, metavar="FILE.safetensors", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Looks at checkpoints; returns the exit status, 1 where one is damaged."""
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

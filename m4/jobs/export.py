"""`m4 export`: writes a run's model for T5X, or for Hugging Face's code."""

import argparse
from pathlib import Path

from m4.jobs import command

EXAMPLE = "m4 export runs/demo --format=t5x --output=exported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_run_folder(parser)
    text = "t5x: a checkpoint to continue from; hf: a folder for transformers and CTranslate2"
    parser.add_argument("--format", choices=["t5x", "hf"], required=True, help=text)
    text = "new folder; for t5x a MODEL_DIR"
    parser.add_argument("--output", type=Path, required=True, help=text)
    text = "step of a kept checkpoint (default: the last complete one)"
    parser.add_argument("--step", type=int, help=text)


def run(arguments: argparse.Namespace) -> None:
    """Exports a checkpoint."""
    from m4.jobs.checkpoints.checkpoint import export, export_hf

    write = export_hf if arguments.format == "hf" else export
    print(write(command.run_of(arguments), arguments.step, arguments.output))

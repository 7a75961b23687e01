"""`m4 collectives`: communication and memory of a config's training step, on fake devices."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m4.jobs import command, streams
from m4.settings import InputError
from m4.storage.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

EXAMPLE = "m4 collectives --gin_file=gin_configs/demo.gin --devices=8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    command.add_config(parser)
    parser.add_argument("--devices", type=int, default=8, help="fake CPU devices (default: 8)")
    parser.add_argument(
        "--languages",
        type=int,
        default=10,
        help="languages of a config whose corpus does not name them (default: 10)",
    )
    parser.add_argument("--output", type=Path, help="a JSON file to write as well")


def run(arguments: argparse.Namespace) -> int:
    """Compiles the training step; returns the exit status."""
    streams.require_output()
    from m4.parallel.platform.jax_setup import use_fake_devices

    if arguments.devices < 1:
        raise InputError(f"--devices={arguments.devices}: must be 1 or more")
    use_fake_devices(arguments.devices)
    with command.experiment_of(arguments) as (experiment, _):
        from m4.plan.compile import local_facts

        found = local_facts(experiment, arguments.languages)
        _show(found, arguments.output, streams.console(columns=200))
    return 0


def _show(found: dict[str, Any], output: Path | None, console: "Console") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"One training step on {found['devices']} devices", box=SIMPLE_HEAD)
    table.add_column("collective")
    for name in ("times", "MiB in", "MiB out", "MiB sent"):
        table.add_column(name, justify="right")
    for kind, total in found["collectives"].items():
        sizes = (total[name] for name in ("operand_bytes", "result_bytes", "sent_bytes"))
        table.add_row(kind, f"{total['count']:,}", *(f"{size / 2**20:,.2f}" for size in sizes))
    console.print(table)
    table = Table(title="Memory of one device", box=SIMPLE_HEAD)
    table.add_column("kind")
    table.add_column("MiB", justify="right")
    for kind, size in found["memory_bytes"].items():
        if kind != "code":  # of a program for CPUs, not for the machine that is meant
            table.add_row(kind, f"{size / 2**20:,.2f}")
    console.print(table)
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")
        console.print(f"wrote {output}", highlight=False, soft_wrap=True)

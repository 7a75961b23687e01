"""`m4 collectives`: what partitioned operators send, or what a config's training step sends.

Without a config it prints Table 4 of GShard, compiled here on fake CPU devices; with a config, the
communication and memory of its training step.
"""

import argparse
import json
import re
import sys
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
    parser.add_argument(
        "--devices",
        help="fake CPU devices: several numbers for the table (default: 2,4,8,16,32,64), one with "
        "a config (default: 8)",
    )
    parser.add_argument(
        "--languages",
        type=int,
        default=10,
        help="languages of a config whose corpus does not name them (default: 10)",
    )
    parser.add_argument("--output", type=Path, help="a JSON file to write as well")


def run(arguments: argparse.Namespace) -> int:
    """Compiles the operators or the training step; returns the exit status."""
    streams.require_output()
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200)
    of_config = bool(arguments.gin_file or arguments.model_dir or arguments.gin_bindings)
    devices = arguments.devices or ("8" if of_config else "2,4,8,16,32,64")
    if not re.fullmatch(r"\d+" if of_config else r"\d+(,\d+)*", devices):
        one = "one number, as 8" if of_config else "numbers with commas between them, as 2,8,64"
        raise InputError(f"--devices={devices}: {one}")
    if of_config:
        from m4.parallel.platform.jax_setup import use_fake_devices

        use_fake_devices(int(devices))
        with command.experiment_of(arguments) as (experiment, _):
            from m4.plan.compile import local_facts

            _show(local_facts(experiment, arguments.languages), arguments.output, console)
        return 0
    from m4.plan import table4

    rows = table4.table([int(count) for count in devices.split(",")])
    table4.show(rows, console)
    if arguments.output:
        table4.save(rows, arguments.output)
        print(f"wrote {arguments.output}")
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

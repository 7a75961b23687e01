"""Collectives and memory of a config's training step on fake CPU devices: `m4 collectives`."""

import json
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from m4.experiment import Experiment
from m4.plan import memory
from m4.plan.hlo import collectives, summary
from m4.plan.program import train_program
from m4.storage.files import write_text


def facts(experiment: Experiment, languages: int) -> dict[str, Any]:
    """Returns collectives and bytes of one device in a training step, by kind, as JSON.

    Nothing is computed and no corpus is read; the vocabularies have the sizes that the config asks
    for.
    """
    program = train_program(experiment, jax.devices(), languages)
    compiled = program.lowered.compile()
    found = summary(collectives(compiled.as_text() or ""))
    return {
        "devices": jax.device_count(),
        "collectives": {kind: total._asdict() for kind, total in found.items()},
        "memory_bytes": memory.by_kind(
            memory.given(program), compiled.memory_analysis(), memory.kept(program)
        ),
    }


def show(experiment: Experiment, languages: int, output: Path | None, console: Console) -> None:
    """Prints `facts`, and writes them to `output` where it is given."""
    found = facts(experiment, languages)
    table = Table(title=f"One training step on {found['devices']} devices", box=SIMPLE_HEAD)
    table.add_column("collective")
    for name in ("times", "MiB in", "MiB out", "MiB sent"):
        table.add_column(name, justify="right")
    for kind, total in found["collectives"].items():
        sizes = (total[name] for name in ("operand_bytes", "result_bytes", "sent_bytes"))
        table.add_row(kind, f"{total['count']:,}", *map(_mib, sizes))
    console.print(table)
    table = Table(title="Memory of one device", box=SIMPLE_HEAD)
    table.add_column("kind")
    table.add_column("MiB", justify="right")
    for kind, size in found["memory_bytes"].items():
        if kind != "code":  # of a program for CPUs, not for the machine that is meant
            table.add_row(kind, _mib(size))
    console.print(table)
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")
        console.print(f"wrote {output}", highlight=False, soft_wrap=True)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f}"

"""What the training step of a config sends and holds on fake CPU devices: `m4 collectives`."""

import json
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from m4.experiment import Setup
from m4.plan import memory
from m4.plan.hlo.collectives import collectives, summary
from m4.plan.program import train_program
from m4.storage.files import write_text

_MIB = 2**20


def facts(setup: Setup, languages: int) -> dict[str, Any]:
    """Collectives of a training step, and bytes, of one device, by kind; as JSON.

    Nothing is computed and no corpus is read; the vocabularies have the sizes that the config asks
    for.

    Raises:
        ValueError: mistakes in the config, before anything is compiled.
    """
    program = train_program(setup, jax.devices(), languages)
    compiled = program.lowered.compile()
    found = summary(collectives(compiled.as_text() or ""))
    return {
        "devices": jax.device_count(),
        "collectives": {kind: vars(total) for kind, total in found.items()},
        "memory_bytes": memory.by_kind(memory.given(program), compiled.memory_analysis()),
    }


def show(setup: Setup, languages: int, output: Path | None, console: Console) -> None:
    """Prints `facts`, and writes them to `output`."""
    found = facts(setup, languages)
    sent = Table(box=SIMPLE_HEAD, title=f"One training step on {found['devices']} devices")
    for name in ("collective", "times", "MiB in", "MiB out", "MiB sent"):
        sent.add_column(name, justify="left" if name == "collective" else "right")
    for kind, total in found["collectives"].items():
        sent.add_row(
            kind,
            f"{total['count']:,}",
            *(
                f"{total[name] / _MIB:,.2f}"
                for name in ("operand_bytes", "result_bytes", "sent_bytes")
            ),
        )
    console.print(sent)
    held = Table(box=SIMPLE_HEAD, title="Memory of one device")
    held.add_column("kind")
    held.add_column("MiB", justify="right")
    for kind, size in found["memory_bytes"].items():
        if kind != "code":  # of a program for CPUs, not of one for the machine that is meant
            held.add_row(kind, f"{size / _MIB:,.2f}")
    console.print(held)
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")
        console.print(f"wrote {output}", highlight=False, soft_wrap=True)

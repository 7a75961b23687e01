"""What the training step of a config sends and holds on fake CPU devices: `m4 collectives`."""

import json
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from m4.experiment import Experiment
from m4.plan import memory
from m4.plan.hlo.collectives import collectives, summary
from m4.plan.program import train_program
from m4.plan.report import pages
from m4.plan.report.pages import Section
from m4.storage.files import write_text


def facts(experiment: Experiment, languages: int) -> dict[str, Any]:
    """Collectives of a training step, and bytes, of one device, by kind; as JSON.

    Nothing is computed and no corpus is read; the vocabularies have the sizes that the config asks
    for.

    Raises:
        ValueError: mistakes in the config, before anything is compiled.
    """
    program = train_program(experiment, jax.devices(), languages)
    compiled = program.lowered.compile()
    found = summary(collectives(compiled.as_text() or ""))
    return {
        "devices": jax.device_count(),
        "collectives": {kind: vars(total) for kind, total in found.items()},
        "memory_bytes": memory.by_kind(
            memory.given(program), compiled.memory_analysis(), memory.kept(program)
        ),
    }


def show(experiment: Experiment, languages: int, output: Path | None, console: Console) -> None:
    """Prints `facts`, and writes them to `output`."""
    found = facts(experiment, languages)
    sent: list[tuple[str, ...]] = [("collective", "times", "MiB in", "MiB out", "MiB sent")]
    for kind, total in found["collectives"].items():
        sizes = (total[name] for name in ("operand_bytes", "result_bytes", "sent_bytes"))
        sent.append((kind, f"{total['count']:,}", *map(_mib, sizes)))
    held = [
        (kind, _mib(size))
        for kind, size in found["memory_bytes"].items()
        if kind != "code"  # of a program for CPUs, not for the machine that is meant
    ]
    title = f"One training step on {found['devices']} devices"
    parts = Section(title, (), sent), Section("Memory of one device", (), [("kind", "MiB"), *held])
    pages.show(parts, console)
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")
        console.print(f"wrote {output}", highlight=False, soft_wrap=True)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f}"

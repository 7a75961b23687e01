"""The job `m4 plan`: has a program compiled apart, shows what was found, writes it down."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from m4.plan import launch, report
from m4.plan.machines import topology
from m4.plan.sweep import sweep
from m4.storage.files import write_text

if TYPE_CHECKING:
    from m4.experiment import Setup

DOES_NOT_FIT = 3
# What is planned for where --topology does not say.
TOPOLOGY = "v3:8x8"


def plan(parsed: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Plans a config for a topology; returns the exit status: 0, or 3 where it does not fit.

    Writes <config>.<topology>.json, .md and .html in `parsed.output`.

    Raises:
        ValueError: a mistake in the arguments or the config, or no TPU compiler.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    if parsed.sweep:
        _check_sweep(parsed)
        return sweep(parsed, bindings, console)
    if len(parsed.gin_file) != 1:
        raise ValueError("give one config: --gin_file=gin_configs/moe_128e_12l.gin; or --sweep")
    if parsed.price_per_chip_hour is not None and not parsed.price_per_chip_hour >= 0:
        raise ValueError(f"--price_per_chip_hour={parsed.price_per_chip_hour}: less than 0")
    config, job = Path(parsed.gin_file[0]).stem, parsed.planned
    machine = parsed.topology or TOPOLOGY
    facts = compiled(config, config_arguments(parsed, bindings), machine, job, console)
    facts["price_per_chip_hour"] = parsed.price_per_chip_hour
    report.show(facts, console)
    for path in report.write(facts, parsed.output / file_name(facts)):
        console.print(str(path), highlight=False, soft_wrap=True)
    return DOES_NOT_FIT if "refused" in facts else 0


def _check_sweep(parsed: argparse.Namespace) -> None:
    """Raises a ValueError for what `--sweep` would not heed."""
    if parsed.gin_file or parsed.model_dir:
        name = "--gin_file" if parsed.gin_file else "--model_dir"
        raise ValueError(f"--sweep has configs of its own: leave {name} out (--configs=...)")
    unheeded = {
        f"--topology={parsed.topology}": parsed.topology is not None,
        f"--job={parsed.planned}": parsed.planned != "train",
        f"--price_per_chip_hour={parsed.price_per_chip_hour}": (
            parsed.price_per_chip_hour is not None
        ),
    }
    if name := next((name for name, given in unheeded.items() if given), None):
        raise ValueError(
            f"{name}: --sweep plans training steps on machines of its own, with no price: leave it "
            "out"
        )


def file_name(facts: Mapping[str, Any]) -> str:
    """moe_128e_12l.v3-8x8, and for decoding moe_128e_12l.v3-8x8.decode."""
    name = f"{facts['config']}.{facts['topology'].replace(':', '-')}"
    return name if facts["job"] == "train" else f"{name}.{facts['job']}"


def config_arguments(parsed: argparse.Namespace, bindings: Sequence[str]) -> list[str]:
    """The arguments that make the compiling process read the same config."""
    found = [f"--gin_file={name}" for name in parsed.gin_file]
    found += [f"--gin_search_paths={parsed.gin_search_paths}", f"--languages={parsed.languages}"]
    found += [f"--gin_bindings={binding}" for binding in [*parsed.gin_bindings, *bindings]]
    return found + (["--debug"] if parsed.debug else [])


def compiled(
    config: str, arguments: Sequence[str], machine: str, job: str, console: Console
) -> dict[str, Any]:
    """The facts of one compilation, with the config's name."""
    platform = topology(machine).platform
    launch.check_compiler(platform)
    asked = [*arguments, f"--topology={machine}", f"--job={job}"]
    with console.status(f"compiling {config} for {machine}: minutes"):
        try:
            found = launch.compile_apart(asked, platform)
        except launch.ChildError as error:
            raise ValueError(str(error)) from error
    return {"config": config, **found}


def write_facts(setup: "Setup", parsed: argparse.Namespace) -> None:
    """In the compiling process: compiles, and writes what it found to `parsed.facts`."""
    launch.end_with_parent()
    from m4.plan.compile import facts

    found = facts(setup, topology(parsed.topology or TOPOLOGY), parsed.planned, parsed.languages)
    write_text(parsed.facts, json.dumps(found, ensure_ascii=False))

"""The job `m4 plan`: compiles a config's program for a machine, prints and writes the plan."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from m4.plan import launch
from m4.plan.machines import topology
from m4.plan.report import tables
from m4.plan.sweep import Sweep
from m4.settings import InputError
from m4.storage.files import write_text

if TYPE_CHECKING:
    from m4.experiment import Experiment

DOES_NOT_FIT = 3
# The machine where --topology names none.
TOPOLOGY = "v3:8x8"


def plan(parsed: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Plans a config for a topology; returns the exit status: 0, or 3 where it does not fit.

    Writes <config>.<topology>.json, .md and .html in `parsed.output`.

    Raises:
        ValueError: a mistake in the arguments or the config, or no compiler for the machine.
    """
    console = Console(width=None if sys.stdout.isatty() else 120)
    shared = _shared_arguments(parsed)
    given = [f"--gin_bindings={binding}" for binding in [*parsed.gin_bindings, *bindings]]
    if parsed.sweep:
        _check_sweep(parsed)
        Sweep(Path(parsed.configs), parsed.output, shared, given, parsed.reuse).run(console)
        return 0
    saved = parsed.model_dir if not parsed.gin_file else None
    if len(parsed.gin_file) != 1 and not saved:
        raise InputError(
            "give one config: --gin_file=gin_configs/moe_128e_12l.gin, or a run folder's: "
            "--model_dir=...; or --sweep"
        )
    if parsed.price_per_chip_hour is not None and not parsed.price_per_chip_hour >= 0:
        raise InputError(f"--price_per_chip_hour={parsed.price_per_chip_hour}: less than 0")
    arguments = [*_config_arguments(parsed), *shared, *given]
    name = Path(saved.rstrip("/")).name if saved else Path(parsed.gin_file[0]).stem
    machine = parsed.topology or TOPOLOGY
    facts = launch.compiled(name, arguments, machine, parsed.program, console)
    facts["price_per_chip_hour"] = parsed.price_per_chip_hour
    tables.show(facts, console)
    for path in tables.write(facts, parsed.output / tables.file_name(facts)):
        console.print(str(path), highlight=False, soft_wrap=True)
    return DOES_NOT_FIT if "refused" in facts else 0


def write_facts(experiment: "Experiment", parsed: argparse.Namespace) -> None:
    """In the compiling process: compiles, and writes what it found to `parsed.facts`."""
    launch.end_with_parent()
    from m4.plan.compile import facts

    found = facts(
        experiment, topology(parsed.topology or TOPOLOGY), parsed.program, parsed.languages
    )
    write_text(parsed.facts, json.dumps(found, ensure_ascii=False))


def _config_arguments(parsed: argparse.Namespace) -> list[str]:
    """What the compiling process needs to read this config: of a file, or a run's saved one."""
    given = [f"--gin_file={name}" for name in parsed.gin_file]
    given += [f"--model_dir={parsed.model_dir}"] if parsed.model_dir else []
    given += [f"--allow_module={name}" for name in parsed.allow_module]
    return given + (["--debug"] if parsed.debug else [])


def _shared_arguments(parsed: argparse.Namespace) -> list[str]:
    """What the compiling process needs to read any config as this process does."""
    return [f"--gin_search_paths={parsed.gin_search_paths}", f"--languages={parsed.languages}"]


def _check_sweep(parsed: argparse.Namespace) -> None:
    """Raises a ValueError for an argument that has no effect with `--sweep`."""
    if parsed.gin_file or parsed.model_dir:
        name = "--gin_file" if parsed.gin_file else "--model_dir"
        raise InputError(f"--sweep plans its own configs: leave {name} out (--configs=...)")
    without_effect = {
        f"--topology={parsed.topology}": parsed.topology is not None,
        f"--program={parsed.program}": parsed.program != "train",
        f"--price_per_chip_hour={parsed.price_per_chip_hour}": (
            parsed.price_per_chip_hour is not None
        ),
    }
    for name, given in without_effect.items():
        if given:
            raise InputError(
                f"{name}: --sweep plans training steps on its own machines, without a price: "
                "leave it out"
            )

"""`m4 plan`: compiles a config's program for another machine, and writes the plan."""

import argparse
import json
import os
from pathlib import Path

from m4.jobs import command, streams
from m4.settings import InputError

EXAMPLE = "m4 plan --gin_file=gin_configs/moe_128e_12l.gin --topology=v3:8x8"
DOES_NOT_FIT = 3
# The default of --topology.
TOPOLOGY = "v3:8x8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser)
    text = "TPU and grid, v4:4x4x4, also in slices, 2*v5e:16x16; or GPU and nodes x GPUs per node, "
    parser.add_argument("--topology", help=f"{text}h100:16x8 (default: {TOPOLOGY})")
    text = "price of a chip or GPU per hour, for the costs in the plan"
    parser.add_argument("--price_per_chip_hour", type=float, help=text)
    text = "program to compile (default: train)"
    parser.add_argument("--program", choices=["train", "decode"], default="train", help=text)
    text = "number of languages if the config does not name them (default: 100)"
    parser.add_argument("--languages", type=int, default=100, help=text)
    text = "folder of the reports (default: runs/plans)"
    parser.add_argument("--output", type=Path, default=Path("runs/plans"), help=text)
    # Output file of the process that compiles.
    parser.add_argument("--facts", type=Path, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int | None:
    """Writes <config>.<topology>.json and .md; returns the exit status, 3 if it does not fit."""
    streams.require_output()
    if arguments.facts is not None:
        return _write_facts(arguments)
    from m4.plan import launch, report

    console = streams.console()
    saved = arguments.model_dir if not arguments.gin_file else None
    if not arguments.gin_file and not saved:
        raise InputError(
            "give a config: --gin_file=gin_configs/moe_128e_12l.gin, or a run folder's: "
            "--model_dir=..."
        )
    price = arguments.price_per_chip_hour
    if price is not None and not price >= 0:
        raise InputError(f"--price_per_chip_hour={price}: less than 0")
    name = "-".join(Path(file).stem for file in arguments.gin_file)
    if saved:
        name = Path(saved.rstrip("/")).name
    given = _config_arguments(arguments), arguments.topology or TOPOLOGY, arguments.program
    facts = launch.compiled(name, *given, console)
    facts["price_per_chip_hour"] = price
    made = report.report(facts)
    report.show(made, console)
    for path in report.write(made, arguments.output / report.file_name(facts), facts):
        console.print(str(path), highlight=False, soft_wrap=True)
    return DOES_NOT_FIT if "refused" in facts else None


def _write_facts(arguments: argparse.Namespace) -> None:
    """Compiles, in a process started for it, and writes its findings to --facts."""
    with command.experiment_of(arguments) as (experiment, _):
        from m4.parallel.platform.signals import end_with

        end_with(os.getppid())  # without the parent's lock nothing compiles
        from m4.parallel.platform.machines import topology
        from m4.plan.compile import facts
        from m4.storage.files import write_text

        machine = topology(arguments.topology or TOPOLOGY)
        found = facts(experiment, machine, arguments.program, arguments.languages)
        write_text(arguments.facts, json.dumps(found, ensure_ascii=False))


def _config_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the arguments with which the compiling process reads this config."""
    given = [f"--gin_file={name}" for name in arguments.gin_file]
    given += [f"--model_dir={arguments.model_dir}"] if arguments.model_dir else []
    given += [f"--allow_module={name}" for name in arguments.allow_module]
    given += ["--debug"] if arguments.debug else []
    given += [f"--gin_search_paths={arguments.gin_search_paths}"]
    given += [f"--languages={arguments.languages}"]
    return [*given, *(f"--gin_bindings={binding}" for binding in arguments.gin_bindings)]

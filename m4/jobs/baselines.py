"""`m4 baselines`: trains and decodes the bilingual baselines that are missing."""

import argparse

from m4.jobs import command

EXAMPLE = "m4 baselines runs/demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, processes=True)
    command.add_flags(parser, "dry_run", "verify")


def run(arguments: argparse.Namespace) -> None:
    """Trains the baselines that are missing."""
    if command.dry_run(arguments):
        return
    with command.opened(arguments, "baselines") as run:
        from m4.jobs.bilingual import baselines
        from m4.parallel.distributed import on_primary_then_broadcast

        on_primary_then_broadcast("baselines", lambda: [*baselines(run.experiment)])
    command.print_next(run, "report")

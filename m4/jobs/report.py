"""`m4 report`: writes scores, ΔBLEU, a plot and a page on one run or several; trains nothing."""

import argparse
import re
from pathlib import Path
from typing import Any

from m4.jobs import command
from m4.settings import InputError

EXAMPLE = "m4 report runs/demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_config(parser, run=False, processes=True)
    group = parser.add_argument_group("several runs", "one page from their translations")
    text = "folders of runs or of translations, each named by its last part or as NAME=RUN; a "
    text += "single one is taken as --model_dir"
    group.add_argument("runs", nargs="*", metavar="RUN", help=text)
    text = "run, or name of one of the runs, to compare with: its bilingual baselines if it has "
    text += "any, otherwise the run itself (default: the first of several runs, itself)"
    group.add_argument("--baseline", metavar="RUN", help=text)
    text = "folder of the report (default: report)"
    group.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    text = "high-resource languages have at least HIGH training pairs, low-resource ones fewer "
    text += "than LOW; means need SENTENCES test sentences (default: the first run's config)"
    group.add_argument("--levels", metavar="HIGH,LOW,SENTENCES", help=text)
    command.add_flags(group, "metrics")
    text = "test sets, with a page each (default: test)"
    group.add_argument("--testsets", metavar="NAME,NAME", help=text)
    command.add_flags(parser, "verify")


def run(arguments: argparse.Namespace) -> None:
    """Reports on a run, or compares several."""
    if several := comparison(arguments):
        from m4.jobs.decoding.report import compare

        compare(**several)
        return
    with command.opened(arguments, "eval") as run:
        from m4.jobs.decoding.report import report, show
        from m4.parallel.distributed import on_primary_then_broadcast

        levels = run.experiment.data.levels
        on_primary_then_broadcast("report", lambda: show(report(run.experiment), levels))


def comparison(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the arguments of `compare`, or None for a single run."""
    if len(arguments.runs) < 2 and not arguments.baseline:
        for name in ("output", "levels", "testsets", "metrics"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name}: only for a report on several runs (RUN_A RUN_B)")
        if arguments.runs and arguments.model_dir:
            run = arguments.runs[0]
            raise InputError(f"{run}: --model_dir names the run, too; give one of them")
        arguments.model_dir = arguments.runs[0] if arguments.runs else arguments.model_dir
        return None
    if not arguments.runs:
        raise InputError("give runs and what to compare them with: RUN_A RUN_B --baseline=RUN_C")
    others = {"gin_file": arguments.gin_file, "gin": arguments.gin_bindings,
              "model_dir": arguments.model_dir, "multiprocess": arguments.processes}  # fmt: skip
    for name, value in others.items():
        if value:
            raise InputError(f"--{name}: not with several runs, of which no config is read")
    testsets = "test" if arguments.testsets is None else arguments.testsets
    if not re.fullmatch(r"\w+(,\w+)*", testsets):
        said = "must be names with commas between them, as test,flores"
        raise InputError(f"--testsets={testsets}: {said}")
    levels = None
    if arguments.levels is not None:
        from m4.eval.scoring.levels import ResourceLevels

        if not re.fullmatch(r"\d+,\d+,\d+", arguments.levels):
            raise InputError(f"--levels={arguments.levels}: must be three numbers, as 3000,1000,50")
        levels = ResourceLevels(*map(int, arguments.levels.split(",")))
    return {
        "runs": arguments.runs, "baseline": arguments.baseline,
        "output": arguments.output or Path("report"), "levels": levels,
        "testsets": testsets.split(","), "metrics": command.metrics_of(arguments),
    }  # fmt: skip

"""The arguments of `m4 report` of several runs."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m4.settings import InputError


def add_comparison(job: argparse.ArgumentParser) -> None:
    """Which runs one report compares."""
    group = job.add_argument_group("several runs", "one page of all, from their translations")
    group.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folders, or folders of translations, each named by its last part or NAME=RUN; "
        "a single one: as --model_dir",
    )
    group.add_argument(
        "--baseline",
        metavar="RUN",
        help="what the runs are compared with: its bilingual baselines, else itself",
    )
    group.add_argument("--output", type=Path, metavar="FOLDER", help="(report)")
    group.add_argument(
        "--levels",
        metavar="HIGH,LOW,SENTENCES",
        help="training pairs from which a language is high-resource, and below which low-resource, "
        "and the fewest test sentences of a mean (those of the first run's config)",
    )


def comparison(
    parsed: argparse.Namespace, bindings: Sequence[str], distributed: bool
) -> dict[str, Any] | None:
    """The arguments of `m4.jobs.decoding.compare.compare`; None: the report is of one run, which
    may be given without --model_dir.

    Raises:
        InputError: arguments that cannot be, or not together.
    """
    if len(parsed.runs) < 2 and not parsed.baseline:
        for name in ("output", "levels"):
            if getattr(parsed, name) is not None:
                raise InputError(f"--{name}: of a report of several runs (RUN_A RUN_B --baseline)")
        if parsed.runs and parsed.model_dir:
            raise InputError(f"{parsed.runs[0]}: --model_dir names the run, too; give one of them")
        parsed.model_dir = parsed.runs[0] if parsed.runs else parsed.model_dir
        return None
    if not parsed.runs or not parsed.baseline:
        raise InputError("give runs and what to compare them with: RUN_A RUN_B --baseline=RUN_C")
    others = {"gin_file": parsed.gin_file, "gin": parsed.gin_bindings or bindings,
              "model_dir": parsed.model_dir, "compare": parsed.compare,
              "multiprocess": distributed}  # fmt: skip
    for name, value in others.items():
        if value:
            raise InputError(f"--{name}: not with several runs, of which no config is read")
    output = parsed.output or Path("report")
    asked = {"runs": parsed.runs, "baseline": parsed.baseline, "output": output, "levels": None}
    if parsed.levels is not None:
        from m4.eval.scoring.levels import ResourceLevels

        if not re.fullmatch(r"\d+,\d+,\d+", parsed.levels):
            raise InputError(f"--levels={parsed.levels}: must be three numbers, as 3000,1000,50")
        asked["levels"] = ResourceLevels(*map(int, parsed.levels.split(",")))
    return asked

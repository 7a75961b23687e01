"""`python -m scripts.results keep|draw|restore`: docs/results.md says when."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from m4.settings import InputError, SettingError
from scripts.results import kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the three commands; returns 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(prog="python -m scripts.results", description=__doc__)
    jobs = parser.add_subparsers(dest="job", required=True)
    job = jobs.add_parser("keep", help="collect from run folders, then draw")
    job.add_argument("experiment", help="a folder's name in results/")
    about = "folder to which run folders in experiment.toml are relative (.)"
    job.add_argument("--base", type=Path, default=Path(), metavar="FOLDER", help=about)
    job = jobs.add_parser("draw", help="draw figures, tables and pages again")
    job.add_argument("experiments", nargs="*", help="names of folders in results/ (all)")
    job = jobs.add_parser("restore", help="put baselines back for m4 baselines")
    job.add_argument("experiment", help="a folder's name in results/")
    job.add_argument("--gin_file", required=True, action="append", help="a config of its runs")
    job.add_argument("--gin", action="append", default=[], metavar="NAME=VALUE")
    for job in jobs.choices.values():
        job.add_argument("--results", type=Path, default=kept.RESULTS, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    try:
        for line in _do(parsed):
            print(line)
    except (InputError, SettingError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    return 0


def _do(parsed: argparse.Namespace) -> list[object]:
    from scripts.results import draw

    if parsed.job == "draw":
        if not parsed.experiments:
            return [*draw.draw_all(parsed.results)]
        drawn = [path for name in parsed.experiments for path in draw.draw(parsed.results / name)]
        return [*drawn, draw.table(parsed.results)]
    folder = parsed.results / parsed.experiment
    if parsed.job == "keep":
        from scripts.results import ablations, curves, speedrun, starts
        from scripts.results.keep import keep

        asked = kept.asked(folder)
        lines = keep(asked, parsed.base) if asked.runs else []
        lines += curves.keep(folder, asked, parsed.base) if asked.curves else []
        lines += ablations.keep(folder, asked, parsed.base) if asked.ablation else []
        lines += speedrun.keep(folder, asked, parsed.base) if asked.speedrun else []
        if asked.starts:
            starts.keep(folder, asked, parsed.base)
        return [*lines, *draw.draw(folder), draw.table(parsed.results)]
    from m4.config import load
    from scripts.results.restore import restore

    return [*restore(folder, load(parsed.gin_file, parsed.gin).experiment())]


if __name__ == "__main__":
    sys.exit(main())

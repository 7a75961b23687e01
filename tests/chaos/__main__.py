"""`make chaos`, or `python -m tests.chaos`: all trials, bounded, and their table.

python -m tests.chaos --seed=1 --kills=100 --damages=150 --folder=/tmp/chaos
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos import environment


def main() -> int:
    """The exit status: 1 where something was lost or silently wrong."""
    parsed = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = (parsed.folder or Path(folder)).absolute()
        environment.set_up(base / "programs")
        from tests.chaos import forks, world
        from tests.chaos.table import kinds, not_held, table
        from tests.chaos.trials import disk

        begin = time.monotonic()
        forks.warm()
        made = world.made(base / "world", reuse=parsed.reuse)
        made = dataclasses.replace(made, means=disk.means())
        trials, out = [], parsed.output and parsed.output.open("w", encoding="utf-8")
        for done in _trials(made, base, parsed):
            trials.append(done)
            row = dataclasses.asdict(done)
            if out:
                print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
            if done.verdict not in ("survived", "named") or parsed.verbose:
                print(f"{done.verdict}: {done.category}: {done.detail}: {done.said}", flush=True)
            if time.monotonic() - begin > 60 * parsed.minutes:
                print(f"stopped after {parsed.minutes} minutes")
                break
    print(table(trials))
    for category in dict.fromkeys(trial.category for trial in trials):
        print(f"{category}: {kinds(trials, category)}")
    print(f"seed {parsed.seed}, disk by {made.means}, {time.monotonic() - begin:.0f} s")
    return int(any(trial.verdict in parsed.fail_on for trial in not_held(trials)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=lambda text: text.split(","), help="only these, as score")
    parser.add_argument("--damages", type=int, default=150, help="of files; 0: none")
    parser.add_argument("--programs", type=int, default=8, help="compiled ones, damaged")
    parser.add_argument("--disks", type=int, default=7, help="full ones; a read-only one a job")
    parser.add_argument("--lines", type=int, default=10_000, help="broken ones")
    parser.add_argument("--losses", type=int, default=4, help="of one of two processes")
    parser.add_argument("--clocks", type=int, default=7, help="times that the clock is set back")
    parser.add_argument("--minutes", type=float, default=60, help="no trial begins after them")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--reuse", action="store_true", help="the undisturbed runs in --folder")
    parser.add_argument("--output", type=Path, help="a JSON line a trial")
    parser.add_argument("--only", help="damages of files whose names contain this")
    parser.add_argument("--verbose", action="store_true", help="what survives is shown, too")
    parser.add_argument(
        "--fail_on", type=lambda text: text.split(","), default=["lost", "silent", "hang"]
    )
    return parser


def _trials(world, base: Path, parsed: argparse.Namespace) -> Iterator:
    from tests.chaos import forks
    from tests.chaos.trial import Trial
    from tests.chaos.trials import clock, damage, disk, kills, processes

    def draw(*what: object) -> random.Random:
        return random.Random(repr((parsed.seed, *what)))  # each trial its own: any can be repeated

    def wanted(name: str) -> bool:
        return not parsed.jobs or name in parsed.jobs

    phases = [phase for phase, (_, name) in kills.WHERE.items() if wanted(name)]
    for number in range(parsed.kills):
        yield kills.kill(world, phases[number % len(phases)], draw("kill", number))
    for number in range(parsed.programs):
        how = list(damage.DAMAGES)[-1 - number % len(damage.DAMAGES)]
        yield damage.of_programs(world, how, draw("program", number))
    jobs = [name for name in disk.WHERE if wanted(name)]
    for number in range(parsed.disks):
        yield disk.full(world, jobs[number % len(jobs)], draw("disk", number))
    for job in jobs[: 3 * parsed.disks]:
        yield disk.read_only(world, job)
    for number in range(parsed.clocks):
        clocks = [name for name in clock.JOBS if wanted(name)]
        yield clock.set_back(world, clocks[number % len(clocks)], draw("clock", number))
    if parsed.lines:
        shutil.rmtree(base / "lines", ignore_errors=True)
        for row in forks.computed(lambda: _of_lines(base / "lines", draw("lines"), parsed.lines)):
            yield Trial(*row)
    together = processes.undisturbed(world) if parsed.losses else world
    for number in range(parsed.losses):
        yield processes.lose(together, draw("loss", number))
    cases = damage.cases(world, draw("cases"))
    cases = [case for case in cases if wanted(damage.JOBS[case[0]][0])]
    cases = [case for case in cases if not parsed.only or parsed.only in case[1]]
    for case in cases[: parsed.damages]:
        yield damage.damage(world, case, draw(case))


def _of_lines(base: Path, draw: random.Random, count: int) -> list[tuple[str, ...]]:
    from tests.chaos.trials import lines

    return [dataclasses.astuple(trial) for trial in lines.among(base, draw, count)]


if __name__ == "__main__":
    sys.exit(main())

"""`make chaos`, or `python -m tests.chaos`: all trials, and their table.

python -m tests.chaos --seed=1 --kills=100 --damages=150 --folder=/tmp/chaos
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.xla_flags import QUICK


def set_up(programs: Path) -> None:
    """Sets the environment of all jobs, before JAX is imported: one device, programs are kept."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="1",
        XLA_FLAGS=QUICK,
        JAX_COMPILATION_CACHE_DIR=str(programs),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="0",
        TF_CPP_MIN_LOG_LEVEL="3",
        OPENBLAS_NUM_THREADS="1",  # no threads before a fork
    )


def main() -> int:
    """Runs the trials; returns 1 where something was lost or silently wrong."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=lambda text: text.split(","), help="only these, as score")
    parser.add_argument("--damages", type=int, default=150, help="damaged files")
    parser.add_argument("--disks", type=int, default=7, help="full ones; a read-only one a job")
    parser.add_argument("--minutes", type=float, default=60, help="no trial begins after them")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="a file with a JSON line a trial")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = (parsed.folder or Path(folder)).absolute()
        set_up(base / "programs")
        from tests.chaos import forks, world
        from tests.chaos.trials import table

        begin, trials = time.monotonic(), []
        forks.warm()
        made = world.made(base / "world")
        for done in _trials(made, parsed):
            trials.append(done)
            if parsed.output:
                with parsed.output.open("a", encoding="utf-8") as out:
                    print(json.dumps(dataclasses.asdict(done), ensure_ascii=False), file=out)
            if done.verdict not in ("survived", "named"):
                print(f"{done.verdict}: {done.category}: {done.detail}: {done.said}", flush=True)
            if time.monotonic() - begin > 60 * parsed.minutes:
                print(f"stopped after {parsed.minutes} minutes")
                break
    print(table(trials))
    print(f"seed {parsed.seed}, {time.monotonic() - begin:.0f} s")
    return int(any(trial.verdict in ("lost", "silent", "hang") for trial in trials))


def _trials(world, parsed: argparse.Namespace) -> Iterator:
    from tests.chaos import trials

    def draw(*what: object) -> random.Random:
        return random.Random(repr((parsed.seed, *what)))  # each trial its own: any can be repeated

    def wanted(names) -> list[str]:
        return [name for name in names if not parsed.jobs or name in parsed.jobs]

    killed, starved = wanted(trials.KILLED), wanted(trials.STARVED)
    for number in range(parsed.kills):
        yield trials.kill(world, killed[number % len(killed)], draw("kill", number))
    if parsed.disks and trials.can_mount():
        for number in range(parsed.disks):
            yield trials.full(world, starved[number % len(starved)], draw("disk", number))
        for name in starved[: 3 * parsed.disks]:
            yield trials.read_only(world, name)
    cases = trials.cases(world, draw("cases"))
    cases = [case for case in cases if wanted([trials.DAMAGED[case[0]][0]])]
    for case in cases[: parsed.damages]:
        yield trials.damage(world, case, draw(case))


if __name__ == "__main__":
    sys.exit(main())

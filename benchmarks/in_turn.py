"""Several benchmarks side by side: each makes a step, then the next one; JSON lines.

    python benchmarks/in_turn.py --steps 40 "python benchmarks/train_step.py" \\
      "peer/bin/python benchmarks/peer_nllb_moe.py"

Each is a process with memory of its own, and waits while another one's step runs: a machine whose
speed changes within minutes changes it for all of them. Of the same machine, one benchmark after
the other can be off by a third. Last comes, for each but the first, how many times the first one's
seconds it takes: the median over the turns, and the ratio of the medians.

The benchmarks of training steps and of layers take their turns from `turns`.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

WAITING = "M4_BENCHMARK_WAITS"  # in the environment of those who wait for their turn
READY, DONE = "ready", "done"


def turns(steps: int) -> Iterator[int]:
    """0 to steps - 1: under `in_turn.py`, each when it is this process' turn."""
    waits = WAITING in os.environ
    if waits:
        print(READY, flush=True)
    for step in range(steps):
        if waits and not sys.stdin.readline():
            sys.exit("in_turn.py has ended")
        yield step
        if waits:
            print(DONE, flush=True)


class Benchmark:
    """A process that waits for its turns; `seconds` of those it had, by this process' clock."""

    def __init__(self, command: str):
        self.command = command
        self.seconds: list[float] = []
        environment = {**os.environ, WAITING: "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            shlex.split(command), stdin=pipe, stdout=pipe, env=environment, text=True
        )

    def read(self) -> str:
        """Its next line; ends this process where there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            sys.exit(f"ended without a result: {self.command}")
        return line

    def turn(self) -> None:
        """Lets it make a step."""
        assert self.process.stdin is not None
        start = time.perf_counter()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.read()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commands", nargs="+", help="benchmarks, without --steps")
    parser.add_argument("--steps", type=int, required=True, help="given to each of them")
    args = parser.parse_args()
    benchmarks = [Benchmark(f"{command} --steps {args.steps}") for command in args.commands]
    for benchmark in benchmarks:
        line = benchmark.read()
        if line != READY:
            sys.exit(f"does not wait for its turn: {benchmark.command}: {line}")
    for _ in range(args.steps):
        for benchmark in benchmarks:
            benchmark.turn()
    for benchmark in benchmarks:
        sys.stdout.writelines(benchmark.process.stdout or ())
    first = benchmarks[0].seconds
    for other in benchmarks[1:]:
        by_turn = statistics.median(b / a for a, b in zip(first, other.seconds, strict=True))
        medians = statistics.median(other.seconds) / statistics.median(first)
        ratios = {"by_turn": round(by_turn, 3), "medians": round(medians, 3)}
        fastest = round(min(other.seconds) / min(first), 3)
        print(json.dumps({"command": other.command, **ratios, "fastest": fastest}))


if __name__ == "__main__":
    main()

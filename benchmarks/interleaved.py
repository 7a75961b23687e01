r"""Runs several benchmarks interleaved, one step of each in turn; prints JSON lines.

    python benchmarks/interleaved.py --steps 40 "python benchmarks/train_step.py" \
      "peer/bin/python benchmarks/peer_train_step.py --balanced"

Each is a separate process that waits while another one's step runs: a machine whose speed changes
within minutes slows all of them. Whole benchmarks one after the other can be off by a third. The
last lines have, for each but the first, its seconds over the first one's: the median over rounds,
and the ratios of the medians and of the fastest; and the same of CPU seconds of all threads, which
count where other work shares the cores. `nice` does not keep work of another terminal from taking
its half of a core where /proc/sys/kernel/sched_autogroup_enabled is 1: stop it before.

Benchmarks of training steps and of layers take their steps from `interleaved_steps`.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAITING = "M4_BENCHMARK_WAITS"  # set in the environment of benchmarks that wait before each step
READY, DONE = "ready", "done"


def interleaved_steps(steps: int, alone: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Yields 0 to steps - 1; under `interleaved.py`, each when it is this process's turn.

    `alone` is called once before, while no other benchmark runs, and may measure the machine.
    """
    waits = WAITING in os.environ

    def begin() -> None:
        if waits and not sys.stdin.readline():
            sys.exit("interleaved.py ended")

    def end() -> None:
        if waits:
            print(DONE, flush=True)

    if waits:
        print(READY, flush=True)
    begin()
    alone()
    end()
    for step in range(steps):
        begin()
        yield step
        end()


class Benchmark:
    """A process that waits before each step.

    It has `seconds` and `cpu_seconds` of its steps, by this process's clock and by the system's.
    """

    def __init__(self, command: str):
        self.command = command
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        environment = {**os.environ, WAITING: "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            shlex.split(command), stdin=pipe, stdout=pipe, env=environment, text=True
        )

    def read(self) -> str:
        """Returns the next line; exits if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            sys.exit(f"ended without a result: {self.command}")
        return line

    def turn(self) -> None:
        """Lets the process run until it waits again."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.read()

    def step(self) -> None:
        """Runs one step."""
        start, cpu = time.perf_counter(), self._used()
        self.turn()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(self._used() - cpu)

    def _used(self) -> float:
        """Returns the CPU seconds of the living threads."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commands", nargs="+", help="benchmarks, without --steps")
    parser.add_argument("--steps", type=int, required=True, help="number of steps of each")
    args = parser.parse_args()
    benchmarks = [Benchmark(f"{command} --steps {args.steps}") for command in args.commands]
    for benchmark in benchmarks:
        line = benchmark.read()
        if line != READY:
            sys.exit(f"does not wait before its steps: {benchmark.command}: {line}")
    for benchmark in benchmarks:
        benchmark.turn()
    for _ in range(args.steps):
        for benchmark in benchmarks:
            benchmark.step()
    for benchmark in benchmarks:
        sys.stdout.writelines(benchmark.process.stdout or ())
    first = benchmarks[0]
    for other in benchmarks[1:]:
        seconds = _ratios(first.seconds, other.seconds)
        cpu = _ratios(first.cpu_seconds, other.cpu_seconds)
        print(json.dumps({"command": other.command, **seconds, "cpu_seconds": cpu}))


def _ratios(first: list[float], other: list[float]) -> dict[str, float]:
    by_round = statistics.median(b / a for a, b in zip(first, other, strict=True))
    medians = statistics.median(other) / statistics.median(first)
    fastest = min(other) / min(first)
    ratios = {"by_round": by_round, "medians": medians, "fastest": fastest}
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


if __name__ == "__main__":
    main()

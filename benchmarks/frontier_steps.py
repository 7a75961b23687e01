"""Measures CPU seconds per training step of each config in a folder of results/, on one core.

    python benchmarks/frontier_steps.py results/frontier --corpus=CORPORA
    python benchmarks/frontier_steps.py results/e4_gates --corpus=CORPUS

Writes seconds.json into the folder, for the runs of its runs.toml (where curves are kept, those
that have one), or those of its ablation: run -> seconds of a step, the median over periods of four
steps, since some optimizers change experts at every fourth. The configs take turns, one step each,
so that a machine whose speed changes slows all of them; the seconds are those that all threads of
this process had a core, so that other work on the machine counts less. Batches are the run's first
ones of the first seed. CORPUS is a folder of a prepared corpus (DATA_DIR/<fingerprint>), CORPORA
one with the folders that runs.toml names (`scripts.seeds`). All models are in memory at once, 2 GB.
"""

import argparse
import os
import sys
import time
import tomllib
from pathlib import Path

import jax
import numpy as np
from interleaved import interleaved_steps

from m4 import config
from m4.build import build
from m4.data.cache.cache import Cache
from m4.parallel.platform.hardware import restart_with_huge_pages
from m4.storage.files import write_json
from m4.train.program import initialize
from scripts import ablations

PERIOD = 4  # steps: the longest `experts_every` of the configs


class Config:
    """A compiled step of one run, with its state; `run` makes the step of a number."""

    def __init__(self, run: dict, corpus: Path):
        bindings = [*run.get("bindings", []), f"experiment.Training.seed = {run['seeds'][0]}"]
        experiment = config.load(run["gin"], bindings).experiment()
        self.name = run["name"]
        cache = Cache(corpus / run.get("corpus", ""), experiment.data.corpus.mixture)
        self.parts = build(experiment, cache)
        program, model = self.parts.program, self.parts.model
        self.state = jax.jit(lambda: initialize(model, program.optimizer, 0))()
        self.step = jax.jit(program.step, donate_argnums=0)
        self.seconds: list[float] = []

    def run(self, number: int) -> None:
        batch = self.parts.stream.batch(number)
        began = time.process_time()
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="in results/")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40, help="a multiple of 4")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before XLA makes its threads
    if (listed := arguments.folder / "runs.toml").is_file():
        runs, curves = tomllib.loads(listed.read_text("utf-8"))["run"], arguments.folder / "curves"
        runs = [run for run in runs
                if not curves.is_dir() or (curves / f"{run['name']}.jsonl").is_file()]  # fmt: skip
    else:
        runs = ablations.timed(arguments.folder)
    configs = [Config(run, arguments.corpus) for run in runs]
    for one in configs:
        for number in range(2):  # compiles, and makes caches warm
            one.run(number)
        print(f"{one.name}: compiled", file=sys.stderr, flush=True)
        one.seconds.clear()
    for number in interleaved_steps(arguments.steps):
        for one in configs:
            one.run(2 + number)
    periods = {one.name: np.reshape(one.seconds, (-1, PERIOD)).mean(1) for one in configs}
    found = {name: round(float(np.median(each)), 4) for name, each in periods.items()}
    write_json(arguments.folder / "seconds.json", found, indent=1)
    print(found)


if __name__ == "__main__":
    restart_with_huge_pages()  # as `m4` does
    main()

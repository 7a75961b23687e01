"""Trains many small models on one accelerator: several seeds of a config at once, configs in turn.

    python -m scripts.seeds results/frontier/runs.toml --corpus=CORPORA --out=runs/frontier

A small model leaves an accelerator idle: its kernels are shorter than their launches. So the seeds
of a config are one program, mapped over seeds, and `--workers` programs run side by side. Each seed
has the batches, initial parameters and random numbers that `m4 train` has for that seed and
Training.rng = 'threefry2x32'. The runs of the file are taken in its order until `--minutes` are
over. CORPORA/<corpus of a run> is a link to DATA_DIR/<fingerprint>, which `m4 data prepare` of the
run's config writes. OUT/<run>.jsonl has a row of dev losses by direction at each evaluation. Of the
first seeds, as many as the run says to `keep`, OUT/<run>.<seed>.safetensors has the latest ones:
`m4 checkpoint convert RUN --weights=FILE --output=FOLDER` makes them a run that translates.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any


def main() -> None:
    arguments = parser().parse_args()
    runs = tomllib.loads(arguments.runs.read_text())["run"]
    names = [run["name"] for run in runs]
    if arguments.only not in (None, *names):
        parser().error(f"--only={arguments.only}: no such run; there are {', '.join(names)}")
    if arguments.only is None:
        made = {path.stem for path in arguments.out.glob("*.jsonl")}
        print(f"there already, remove them to train them again: {', '.join(made) or 'none'}")
        side_by_side([name for name in names if name not in made], arguments)
    else:
        train(runs[names.index(arguments.only)], arguments)


def side_by_side(waiting: list[str], arguments: argparse.Namespace) -> None:
    """Runs each name in a process, in order; ends at the deadline, or when the first three fail."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    working, statuses = dict[str, subprocess.Popen[bytes]](), list[int | None]()
    while (waiting or working) and time.monotonic() < deadline:
        if len(statuses) >= 3 and 0 not in statuses:
            break
        while waiting and len(working) < arguments.workers:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "scripts.seeds", *sys.argv[1:], f"--only={name}"]
            with (arguments.out / f"{name}.log").open("w") as log:
                working[name] = subprocess.Popen(command, stdout=log, stderr=log)
        time.sleep(0.2)
        for name in [name for name, process in working.items() if process.poll() is not None]:
            statuses.append(working.pop(name).returncode)
            print(f"{name}: status {statuses[-1]}, {deadline - time.monotonic():.0f} s left")
    for name, process in working.items():
        process.kill()
        print(f"{name}: stopped")
    print(f"not begun: {waiting}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("runs", type=Path, help="TOML: [[run]], each with name, gin, seeds, steps")
    made.add_argument("--corpus", type=Path, required=True, help="folder with prepared corpora")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--minutes", type=float, default=1e6)
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--only", help="the run with this name, in this process")
    return made


def train(run: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Trains all seeds of a run at once; writes its rows."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np

    from m4 import config
    from m4.build import build
    from m4.data.cache.cache import Cache
    from m4.storage import safetensors
    from m4.train import average
    from m4.train.program import initialize
    from m4.train.step import make_eval_step, make_train_step

    name, seeds, steps = run["name"], run["seeds"], run["steps"]
    bindings = [*run.get("bindings", []), f"TRAIN_STEPS = {steps}"]
    experiment = config.load(run["gin"], bindings, model_dir="runs/unused").experiment()
    cache = Cache(arguments.corpus / run.get("corpus", ""), experiment.data.corpus.mixture)
    training, parts = experiment.training, build(experiment, cache)
    model, optimizer = parts.model, training.optimizer(steps)

    def stream_of(seed: int):
        seeded = dataclasses.replace(training, seed=seed)
        return build(dataclasses.replace(experiment, training=seeded), cache).stream

    streams = [stream_of(seed) for seed in seeds]
    directions = streams[0].directions

    def step_of(seed, carried, batch):
        state, sums = carried
        # Mapped over keys, unsafe_rbg draws with the first of them alone.
        drawn = dataclasses.replace(training, rng="threefry2x32", parameter_rates=None)
        step = make_train_step(model, optimizer, drawn, len(directions), seed=seed)
        state, metrics = step(state, batch)
        # Scalars alone: what else layers sow is by layer or direction.
        return state, {
            k: sums.get(k, 0.0) + v for k, v in metrics.items() if getattr(v, "ndim", 1) == 0
        }

    def evaluate(params, batches):
        def one(_, batch):
            return None, make_eval_step(model, directions=len(directions))(params, batch)

        return jax.tree.map(lambda x: x.sum(0), jax.lax.scan(one, None, batches)[1])

    step = jax.jit(jax.vmap(step_of), donate_argnums=1)
    dev = jax.device_put(_dev(cache, streams[0]))
    evaluated = jax.jit(jax.vmap(evaluate, in_axes=(0, None)))
    key = jnp.asarray(seeds)
    state = jax.jit(jax.vmap(functools.partial(initialize, model, optimizer)))(key)
    sizes = [int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(state.params)]
    begun = {"run": name, "seeds": seeds, "parameters": sum(sizes), "directions": directions}
    at = set(run.get("evaluate", [500, *range(1000, steps, 1000), 5500])) | {steps}
    with (arguments.out / f"{name}.jsonl").open("x") as rows:  # curves of hours are not begun anew
        print(json.dumps(begun), file=rows, flush=True)
        since, seconds, sums, before = time.monotonic(), 0.0, dict[str, Any](), 0
        for number in range(steps):
            made = [stream.batch(number) for stream in streams]
            batch = {k: np.stack([one[k] for one in made]) for k in made[0]}
            if number == 0:
                shapes = jax.eval_shape(jax.vmap(step_of), key, (state, {}), batch)[1]
                sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            state, sums = step(key, (state, sums), batch)
            if number % 50 == 9:
                jax.block_until_ready(sums)
            if number == 9:  # without what compiles
                since, seconds = time.monotonic(), 0.0
            if number + 1 not in at:
                continue
            means = {k: (np.asarray(v) / (number + 1 - before)).tolist() for k, v in sums.items()}
            seconds += time.monotonic() - since
            params = average.used(state)
            found = jax.device_get(evaluated(params, dev))
            nll = found["nll_sum_D"].sum(1) / found["tokens_D"].sum(1)
            by_direction = found["nll_sum_D"].astype(float) / np.maximum(found["tokens_D"], 1)
            row = {"step": number + 1, "seconds": round(seconds, 2), "nll": nll.tolist()}
            row |= {"by_direction": np.round(by_direction, 4).tolist(), "train": means}
            print(json.dumps(row), file=rows, flush=True)
            sums, before = jax.tree.map(jnp.zeros_like, sums), number + 1
            since = time.monotonic()
            leaves = jax.tree_util.tree_flatten_with_path(params)[0]
            for i, seed in enumerate(seeds[: run.get("keep", 0)]):
                arrays = {"/".join(k.key for k in path): np.asarray(x[i]) for path, x in leaves}
                about = {"step": str(number + 1)}
                safetensors.write(arguments.out / f"{name}.{seed}.safetensors", arrays, about)


def _dev(cache: Any, stream: Any) -> dict[str, Any]:
    """Returns all dev batches, stacked: each array [batches, rows, length]."""
    import numpy as np

    from m4.data.directions import pair_of
    from m4.data.stream.batches import Shape, evaluation_batches

    directions = [d for d in stream.directions if cache.size(pair_of(d), "dev")]
    number = np.array([stream.directions.index(d) for d in directions], np.int32)
    shape = Shape(stream.batch_rows, stream.source_length, stream.target_length)
    made = list(evaluation_batches(cache, directions, "dev", shape))
    stacked = {k: np.stack([one[k] for one in made]) for k in made[0]}
    for name in ("direction_ids", "encoder_direction_ids"):
        stacked[name] = number[stacked[name]]
    return stacked


if __name__ == "__main__":
    main()

"""Measures the cost of a checkpoint's manifest.

It times saves with and without it, interleaved, steps of training during which they are written, a
restore, and its verification.

python benchmarks/checkpoint_hashing.py --megabytes=400 --rounds=5
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from m4.parallel.platform.jax_setup import check_accelerator
from m4.storage import checksums, steps
from m4.storage.checkpoints import Checkpoints, shapes

_ARRAYS = 16
_STEPS = 60
_Seconds = defaultdict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="size of arrays (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number timed (%(default)s)")
    parsed = parser.parse_args()
    check_accelerator()
    rows = parsed.megabytes * 10**6 // (_ARRAYS * 4 * 1024)
    tree = {
        f"w{i}": jax.random.normal(jax.random.key(i), (rows, 1024), jnp.float32)
        for i in range(_ARRAYS)
    }
    jax.block_until_ready(tree)
    seconds: _Seconds = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stores:
        hashed, plain = (
            stores.enter_context(Checkpoints(Path(folder) / name, keep=1))
            for name in ("hashed", "plain")
        )
        for step in range(parsed.rounds + 1):
            with (
                _timed(steps, "write_own", seconds),
                _timed(steps, "write_whole", seconds),
            ):
                _save(hashed, step, tree, "hashed", seconds)
            with _replaced(checksums, "hashes", _no_hashes):
                _save(plain, step, tree, "plain", seconds)
        later = range(parsed.rounds + 1, 2 * parsed.rounds + 2)
        for step in later:
            _steps(None, step, tree, "steps", seconds)
            _steps(hashed, step, tree, "hashed steps", seconds)
            with _replaced(checksums, "hashes", _no_hashes):
                _steps(plain, step, tree, "plain steps", seconds)
        for _ in range(parsed.rounds + 1):
            checksums._same.clear()
            start = time.perf_counter()
            assert steps.problem(hashed.folder / str(later[-1])) is None
            verified = time.perf_counter()
            hashed.restore(later[-1], {"params": shapes(tree)})
            seconds["verify"].append(verified - start)
            seconds["restore"].append(time.perf_counter() - verified)
    _report(tree, {name: statistics.median(values[1:]) for name, values in seconds.items()})


def _save(store: Checkpoints, step: int, tree: Any, name: str, seconds: _Seconds) -> None:
    os.sync()  # writes of others are not part of this save
    start, used = time.perf_counter(), time.process_time()
    store.save(step, {"params": tree}, {})
    seconds[f"{name} blocks"].append(time.perf_counter() - start)
    store.wait()
    seconds[name].append(time.perf_counter() - start)
    seconds[f"{name} cpu"].append(time.process_time() - used)


@jax.jit
def _step(x: jax.Array) -> jax.Array:
    """Computes products on all cores."""
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), x)


def _steps(store: Checkpoints | None, step: int, tree: Any, name: str, seconds: _Seconds) -> None:
    """Takes enough steps that a save begins and ends within them."""
    x = jnp.full((1024, 1024), 0.01)
    os.sync()
    start = time.perf_counter()
    if store is not None:
        store.save(step, {"params": tree}, {})
    for _ in range(_STEPS):
        x = _step(x)
        x.block_until_ready()
    seconds[name].append(time.perf_counter() - start)
    if store is not None:
        seconds[f"{name}, the save's end"].append(-time.perf_counter())
        store.wait()
        seconds[f"{name}, the save's end"][-1] += time.perf_counter()


def _report(tree: Any, median: dict[str, float]) -> None:
    last = median["finish"] + median["write_whole"]
    rows = {
        "training waits for a save": median["hashed blocks"],
        "the same without SHA-256, waits": median["plain blocks"],
        f"{_STEPS} steps": median["steps"],
        f"{_STEPS} steps and a save": median["hashed steps"],
        "the same without SHA-256, steps": median["plain steps"],
        "of that save after the steps": median["hashed steps, the save's end"],
        "a save": median["hashed"],
        "the same without SHA-256": median["plain"],
        "of a save, SHA-256 after the last write": last,
        "CPU of a save": median["hashed cpu"],
        "the same without SHA-256, CPU": median["plain cpu"],
        "comparing a checkpoint": median["verify"],
        "reading it after that": median["restore"],
    }
    print(f"{sum(x.nbytes for x in tree.values()) / 1e6:.0f} MB of arrays; medians")
    for name, value in rows.items():
        print(f"{name:40} {value:7.3f} s")
    share = {
        "of a save's time": median["hashed"] / median["plain"] - 1,
        "after the last write": last / (median["hashed"] - last),
        "of its CPU time": median["hashed cpu"] / median["plain cpu"] - 1,
        "of it for training": (median["hashed steps"] - median["plain steps"]) / median["plain"],
    }
    print("SHA-256:", ", ".join(f"{value:+.1%} {name}" for name, value in share.items()))


def _no_hashes(
    store: checksums.Folder, names: Iterable[str], *, threads: int = 8
) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(names, (0, ""))


@contextlib.contextmanager
def _timed(module: Any, name: str, seconds: _Seconds) -> Iterator[None]:
    """Context that records the seconds of every call."""
    work: Callable[..., Any] = getattr(module, name)

    def timed(*arguments: Any) -> None:
        start = time.perf_counter()
        work(*arguments)
        seconds[name].append(time.perf_counter() - start)

    with _replaced(module, name, timed):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    work = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, work)


if __name__ == "__main__":
    main()

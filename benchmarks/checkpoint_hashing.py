"""What a checkpoint's manifest costs: a save, its hashing, a restore, its verification.

python benchmarks/checkpoint_hashing.py --megabytes=400 --rounds=5
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from m4.storage import checksums, manifest
from m4.storage.checkpoints import Checkpoints, shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="of arrays (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parsed = parser.parse_args()
    arrays = 16
    rows = parsed.megabytes * 10**6 // (arrays * 4 * 1024)
    tree = {
        f"w{i}": jax.random.normal(jax.random.key(i), (rows, 1024), jnp.float32)
        for i in range(arrays)
    }
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(Path(folder) / "checkpoints", keep=1)
        with _timed(manifest, "write_own", seconds), _timed(manifest, "write_whole", seconds):
            for step in range(1, parsed.rounds + 2):
                start = time.perf_counter()
                store.save(step, {"params": tree}, {})
                blocked = time.perf_counter() - start
                store.wait()
                seconds.setdefault("save blocks", []).append(blocked)
                seconds.setdefault("save", []).append(time.perf_counter() - start)
        for _ in range(parsed.rounds + 1):
            checksums.forget()
            start = time.perf_counter()
            assert manifest.problem(store.folder / str(step)) is None
            verified = time.perf_counter()
            store.restore(step, {"params": shapes(tree)})
            seconds.setdefault("verify", []).append(verified - start)
            seconds.setdefault("restore", []).append(time.perf_counter() - verified)
        store.close()
    size = sum(x.nbytes for x in tree.values()) / 1e6
    print(f"{size:.0f} MB of arrays; medians of {parsed.rounds} after a first one")
    for name, values in seconds.items():
        print(f"{name:12} {statistics.median(values[1:]):7.3f} s")


@contextlib.contextmanager
def _timed(module: Any, name: str, seconds: dict[str, list[float]]) -> Iterator[None]:
    """Within it the seconds of every call are kept."""
    work: Callable[..., Any] = getattr(module, name)

    def timed(*arguments: Any) -> None:
        start = time.perf_counter()
        work(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    setattr(module, name, timed)
    try:
        yield
    finally:
        setattr(module, name, work)


if __name__ == "__main__":
    main()

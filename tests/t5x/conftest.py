"""Runs of stock T5X, where it is installed: `python -m t5x.train` and so on, in other processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from m4.data.cache.cache import Cache
from m4.data.corpus import CorpusSpec
from tests.data.corpus import Made

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]


def needs_t5x() -> None:
    """Skips a file; what m4 alone shows of the same is in tests/data/test_tasks.py."""
    # A folder gin_configs/t5x on the path is a t5x, too.
    why = "stock T5X is not installed, and no registry has it (docs/t5x.md)"
    pytest.importorskip("t5x.train", reason=why)


@pytest.fixture(scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    spec = CorpusSpec(
        Made({"gl": 300, "pt": 100}), vocabulary_size=500, lengths={"inputs": 64, "targets": 64}
    )
    return spec.build(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture(scope="package")
def run_t5x(cache: Cache) -> Run:
    """Returns (script, config of gin_configs/t5x, devices, bindings) -> T5X's output."""

    def run(script: str, config: str, *bindings: str, devices: int = 1) -> str:
        environment = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_NUMPY_RANK_PROMOTION": "allow",  # these tests' own rule, not T5X's
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, "-m", f"t5x.{script}", f"--gin_search_paths={ROOT}"]
        given = [f"M4_CACHE='{cache.folder}'", "BATCH_SIZE=8", *bindings]
        done = subprocess.run(
            [*command, f"--gin_file=gin_configs/t5x/{config}.gin", *(f"--gin.{g}" for g in given)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stderr

    return run

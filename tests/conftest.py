"""JAX as tests want it, set before anything imports it."""

import os
from pathlib import Path

import pytest

# Eight devices on any machine, so that sharding is tested; one is what everything else uses.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# x[B, L] + y[L] is an error: shapes are to be said, not guessed.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Programs here are tiny and many: compiling them is nearly all the time that tests take. Without
# LLVM's optimizations and MLIR's fusions it takes half of it.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
# ... so they are kept for the next run. The folder may be deleted at any time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def pytest_configure(config: pytest.Config) -> None:
    """A file of the cache that a killed run left unfinished is compiled again, not an error."""
    config.addinivalue_line(
        "filterwarnings", "default:Error reading persistent compilation cache entry:UserWarning"
    )

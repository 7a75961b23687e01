"""JAX as tests want it, set before anything imports it."""

import os

# Eight devices on any machine, so that sharding is tested; one is what everything else uses.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# x[B, L] + y[L] is an error: shapes are to be said, not guessed.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Programs here are tiny and many: compiling them is nearly all the time that tests take.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")

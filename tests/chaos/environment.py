"""The environment of all jobs here, set before JAX is imported: that of tests, and one device."""

from __future__ import annotations

import os
from pathlib import Path

from tests.xla_flags import QUICK


def set_up(programs: Path) -> None:
    """programs: where compiled programs are kept, all of them, so that no trial compiles."""
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

"""The key under which floating-point numbers are recorded: what decides how a machine rounds."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

_WIDEST_FIRST = ("avx512f", "avx2", "avx")


def key() -> str:
    """Returns JAX's version, the CPU's instruction set and a hash of a small computation.

    Two kinds of CPU with one instruction set may be compiled for in two ways; the computation has
    the operations of a model, so that its bits differ where those of a model would.
    """
    return f"jax {jax.__version__}, {instruction_set()}, {_probe()[:8]}"


def instruction_set() -> str:
    """Returns the widest vector instructions of this CPU, or its architecture."""
    about = Path("/proc/cpuinfo")
    words = set(about.read_text(encoding="utf-8").split()) if about.is_file() else set()
    return next((name for name in _WIDEST_FIRST if name in words), platform.machine())


def _probe() -> str:
    """Returns the SHA-256 of a gradient through the operations of a transformer."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w) * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.sum(jax.nn.log_softmax(hidden @ w.T, axis=-1)[:, 0])

    random = np.random.default_rng(0)
    w = random.standard_normal((96, 80)).astype(np.float32)
    x = random.standard_normal((48, 96)).astype(np.float32)
    gradient = jax.jit(jax.value_and_grad(loss))(w, x)
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in gradient)).hexdigest()

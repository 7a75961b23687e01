"""Peak speeds of devices that are there. MFU is the share of the peak that is used.

Sources: `m4.plan.machines` for the machines that are planned for; for other GPUs NVIDIA's data
    sheets (A100, H100 PCIe, L4, T4), dense products, without sparsity.
"""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from m4.plan.machines import CHIPS, GPUS

# JAX's names of TPUs.
_TPUS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# CUDA's names begin so -> operations a second, of 16 bits and of float32 (TF32 where there is
# one, which XLA takes by default).
_GPUS = {
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA A100": (312e12, 156e12),
    "NVIDIA L4": (121e12, 60e12),
    "Tesla T4": (65e12, 8.1e12),
}
# Sizes of a product that takes tens of milliseconds on CPU cores, and some on a small accelerator.
_CPU_SIZE, _ACCELERATOR_SIZE, _TIMES = 1024, 4096, 5


def peak_flops(devices: Sequence[Any], dtype: Any) -> float:
    """Returns the peak of matrix products in this type, of all devices of a job together.

    It is in operations a second: stated where the devices' kind is known, else measured.
    """
    name = jnp.dtype(dtype).name
    stated = stated_peak(devices[0].device_kind, name)
    if stated is not None:
        return stated * len(devices)
    if devices[0].platform == "cpu":  # the devices of a process share its cores
        return measured_peak(name) * jax.process_count()
    return measured_peak(name) * len(devices)


def stated_peak(kind: str, dtype: str) -> float | None:
    """Returns the peak of one device of this `device_kind`, or None if the tables lack it."""
    if kind in _TPUS:
        return CHIPS[_TPUS[kind]].device_flops(dtype)
    for gpu in GPUS.values():
        if kind == gpu.description:
            return gpu.device_flops(dtype)
    # "NVIDIA L40S" begins as "NVIDIA L4" does, and is another one.
    known = [name for name in _GPUS if re.match(rf"{name}\b", kind)]
    if not known:
        return None
    half, single = _GPUS[max(known, key=len)]
    return single if dtype == "float32" else half


def measured_peak(dtype: str) -> float:
    """Measures the fastest of some products of large square matrices on the default device."""
    size = _CPU_SIZE if jax.default_backend() == "cpu" else _ACCELERATOR_SIZE
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    fastest = math.inf
    for _ in range(_TIMES):
        begin = time.perf_counter()
        jax.block_until_ready(product(x, x))
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * size**3 / fastest

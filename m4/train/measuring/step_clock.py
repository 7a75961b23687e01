"""The time of a training run: in steps, waiting for data, and all else; and the devices' peak.

MFU is the share of the peak that is used. Peaks that are stated here are from NVIDIA's data sheets
(dense products, without sparsity), those of other devices from `m4.parallel.platform.machines`.
"""

import collections
import contextlib
import dataclasses
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from m4.parallel.platform.machines import CHIPS, GPUS

# The typical step is the median of so many.
_TYPICAL_STEPS = 101
# JAX's names of TPUs.
_TPUS = {
    **{f"TPU {name}": name for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e")},
    **{"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"},
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


@dataclasses.dataclass(frozen=True)
class Flops:
    """Model FLOPs of a step, and the peak FLOPs a second of all devices."""

    step: float
    peak: float


@dataclasses.dataclass
class StepClock:
    """Measures steps from outside of the devices.

    A step lasts from the end of the one before, or of a pause, until the loop has seen its own end,
    with the wait for its batch. Pauses are no step's: compiling (with the step that is compiled for
    and its batch), evaluating and saving. `started` is the run's first start, `saved` the note of a
    checkpoint, `devices` on CPUs the number of cores. `step` was dispatched last, `phase` is
    "step", "data" (waiting for a batch) or a pause's name, and began at `since`.
    """

    flops: Flops | None
    started: float
    saved: dataclasses.InitVar[Mapping[str, Any]]
    devices: int = 1

    def __post_init__(self, saved: Mapping[str, Any]) -> None:
        self.step, self.phase, self.since = 0, "step", time.monotonic()
        self._waited = 0.0
        self._in_steps = float(saved.get("seconds_in_steps", 0.0))
        self._recent: collections.deque[float] = collections.deque(maxlen=_TYPICAL_STEPS)
        self.longest: dict[str, float] = {}  # finished pauses by their phase
        self._clear()

    def _clear(self) -> None:
        self._steps: list[float] = []
        self._waits: list[float] = []

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Within it the loop waits for this step's batch."""
        self.step, self.phase, begin = step, "data", time.monotonic()
        yield
        self._waited = time.monotonic() - begin
        self.phase = "step"

    def dispatched(self) -> None:
        """The step of that batch runs, or waits on the device, and its time counts."""
        self._waits.append(self._waited)

    @contextlib.contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Within it no step runs; the next one begins at its end."""
        begin = self.since = time.monotonic()  # before the phase: the watchdog reads both
        self.phase = phase
        yield
        self.since = time.monotonic()
        self.longest[phase] = max(self.longest.get(phase, 0.0), self.since - begin)
        self.phase = "step"

    def ended(self) -> None:
        """A step has ended."""
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        self._steps.append(seconds)
        self._recent.append(seconds)
        self._in_steps += seconds

    @property
    def typical_seconds(self) -> float:
        """The median of the last steps; 0: there was none."""
        recent = self._recent.copy()
        return statistics.median(recent) if recent else 0.0

    def row(self, step: int) -> dict[str, float]:
        """Returns metrics of the steps since the last row, up to `step` (docs/performance.md)."""
        wall = max(time.time() - self.started, self._in_steps, 1e-9)
        row = {"goodput": self._in_steps / wall, "device_seconds": self._in_steps * self.devices}
        if self.flops is not None:
            row["model_flops"] = self.flops.step * step
        if self._waits:
            row["data_wait_seconds"] = statistics.fmean(self._waits)
        if self._steps:
            row["step_seconds"] = statistics.fmean(self._steps)
            row["step_seconds_deviation"] = statistics.pstdev(self._steps)
            if self.flops is not None:
                computed = self.flops.step * len(self._steps)
                row["mfu"] = computed / max(sum(self._steps), 1e-9) / self.flops.peak
        self._clear()
        return row

    def note(self) -> dict[str, Any]:
        return {"seconds_in_steps": self._in_steps}


def peak_flops(devices: Sequence[Any], dtype: Any) -> float:
    """Returns the peak of matrix products in this type, of all devices of a job together.

    It is in operations a second: stated where the devices' kind is known, else measured.
    """
    name = jnp.dtype(dtype).name
    if (stated := stated_peak(devices[0].device_kind, name)) is not None:
        return stated * len(devices)
    on_cpu = devices[0].platform == "cpu"  # the devices of a process share its cores
    return measured_peak(name) * (jax.process_count() if on_cpu else len(devices))


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

"""Time of a training run, in steps, in waiting for data and elsewhere; and the devices' peak.

MFU is the used share of the peak. Peaks stated here are from NVIDIA's data sheets (dense products,
without sparsity), those of TPUs from `m4.parallel.platform.machines`.
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

# Number of steps whose median is the typical one.
_TYPICAL_STEPS = 101
# JAX's names for TPUs.
_TPUS = {
    **{f"TPU {name}": name for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e")},
    **{"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"},
}
# Beginning of CUDA's name -> FLOP/s in 16 bits and in float32 (TF32 if available, which XLA uses
# by default).
_GPUS = {
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA A100": (312e12, 156e12),
    "NVIDIA L4": (121e12, 60e12),
    "Tesla T4": (65e12, 8.1e12),
}
# Sizes of products that take tens of milliseconds on CPU cores, and a few on a small accelerator.
_CPU_SIZE, _ACCELERATOR_SIZE, _TIMES = 1024, 4096, 5


@dataclasses.dataclass(frozen=True)
class Flops:
    """Model FLOPs of a step, and the peak FLOP/s of all devices."""

    step: float
    peak: float


@dataclasses.dataclass
class StepClock:
    """Measures the time of steps from outside the devices.

    A step lasts from the end of the previous step or pause until the loop sees its own end, with
    the wait for its batch. Pauses belong to no step: compiling (with its first step and batch),
    evaluating and saving. `started` is the run's first start, `saved` the note of a checkpoint, and
    `devices` on CPUs the number of cores. `step` was dispatched last; `phase` is "step", "data"
    (waiting for a batch) or a pause's name, and began at `since`.
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
        self.longest: dict[str, float] = {}  # finished pauses by phase
        self._clear()

    def _clear(self) -> None:
        self._steps: list[float] = []
        self._waits: list[float] = []

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Context in which the loop waits for this step's batch."""
        self.step, self.phase, begin = step, "data", time.monotonic()
        yield
        self._waited = time.monotonic() - begin
        self.phase = "step"

    def dispatched(self) -> None:
        """Records that the step runs, or waits on the device, so that its time counts."""
        self._waits.append(self._waited)

    @contextlib.contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Context in which no step runs; the next one begins at its end."""
        begin = self.since = time.monotonic()  # set before the phase, as the watchdog reads both
        self.phase = phase
        yield
        self.since = time.monotonic()
        self.longest[phase] = max(self.longest.get(phase, 0.0), self.since - begin)
        self.phase = "step"

    def ended(self) -> None:
        """Records the end of a step."""
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        self._steps.append(seconds)
        self._recent.append(seconds)
        self._in_steps += seconds

    @property
    def typical_seconds(self) -> float:
        """Returns the median of the last steps, or 0 without steps."""
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
    """Returns the peak FLOP/s of matrix products in this type, over all devices of a job.

    It is a stated value for a known kind of device, otherwise measured.
    """
    name = jnp.dtype(dtype).name
    if (stated := stated_peak(devices[0].device_kind, name)) is not None:
        return stated * len(devices)
    on_cpu = devices[0].platform == "cpu"  # a process's devices share its cores
    return measured_peak(name) * (jax.process_count() if on_cpu else len(devices))


def stated_peak(kind: str, dtype: str) -> float | None:
    """Returns the peak of one device of this `device_kind`, or None if the tables lack it."""
    if kind in _TPUS:
        return CHIPS[_TPUS[kind]].device_flops(dtype)
    for gpu in GPUS.values():
        if kind == gpu.description:
            return gpu.device_flops(dtype)
    # "NVIDIA L40S" begins like "NVIDIA L4", but is another GPU.
    known = [name for name in _GPUS if re.match(rf"{name}\b", kind)]
    if not known:
        return None
    half, single = _GPUS[max(known, key=len)]
    return single if dtype == "float32" else half


def measured_peak(dtype: str) -> float:
    """Measures the fastest of several products of large square matrices on the default device."""
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

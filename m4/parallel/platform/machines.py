"""The machines to plan for: TPU slices and clusters of GPUs, their chips and links.

Sources for TPUs: v2 and v3 from Jouppi et al. 2020 (CACM 63.7), the links of v3 and v4 from Jouppi
et al. 2023 (arXiv 2304.01433, table 4), v4 to tpu7x from docs.cloud.google.com/tpu/docs, a page
each, at the end of 2025. A link's speed is that of one direction: a quarter or a sixth of half of
what those pages call bidirectional bandwidth. Clocks of v5e and v5p follow from peak and number of
multipliers (128 x 128 a unit); those of v6e and tpu7x are not published. The pages also have the
network between slices: by host for v5e and v6e (2 x 100 and 4 x 200 Gb/s), by chip for v5p and
tpu7x (50 and 100 Gb/s). v4 has 25 GB/s a host (Austin et al. 2025, "How to Scale Your Model", part
2). Slices of v2 and v3 cannot be joined (Cloud TPU Multislice is for v4 and later).

Sources for GPUs: NVIDIA's data sheets of the H100 SXM5 and H200 SXM (peaks without sparsity,
memory, NVLink), the tables of compute capability 9.0 in the CUDA C++ programming guide, and
NVIDIA's DGX H100 for the network between nodes, one adapter of 400 Gb/s a GPU.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from m4.settings import InputError

GIB = 2**30


class Chip(NamedTuple):
    """A kind of TPU chip."""

    name: str
    cores: int  # JAX devices per chip
    gib: float  # memory per chip
    peak_flops: float  # peak operations in bfloat16 per chip and second
    # Clock of a core, for the compiler's estimate of cycles; None if it is not published.
    clock_hz: float | None
    links: int  # links to neighbours per chip: two per dimension of the torus
    link_bytes: float  # bytes per second of one link in one direction
    full: int  # number of chips along a dimension from which on it is a ring (a torus, not a grid)
    most: int  # chips of the largest slice
    host_chips: int  # chips of a host, which share its network adapters
    # Bytes per second and host to other slices; 0 if slices cannot be joined.
    host_network_bytes: float
    # libtpu's name for a chip whose cores form one device; "" if each core is a device.
    core_setting: str = ""

    platform = "tpu"

    @property
    def network_bytes(self) -> float:
        """Bytes per second to other slices, per device; a host's devices share its adapters."""
        return self.host_network_bytes / self.host_chips / self.cores

    @property
    def device_bytes(self) -> int:
        """Memory of a JAX device, of which programs can use slightly less."""
        return int(self.gib * GIB / self.cores)

    @property
    def device_name(self) -> str:
        """Name of a JAX device: "core", or "device" if two cores form one."""
        return "device" if self.core_setting else "core"

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of matrix products of any type, as TPUs round to bfloat16."""
        del dtype
        return self.peak_flops / self.cores


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", 2, 16, 46e12, 0.70e9, 4, 62e9, 16, 256, 4, 0),
        Chip("v3", 2, 32, 123e12, 0.94e9, 4, 70e9, 32, 1024, 4, 0),
        Chip("v4", 1, 32, 275e12, 1.05e9, 6, 50e9, 4, 4096, 4, 25e9, "megacore"),
        Chip("v5e", 1, 16, 197e12, 1.50e9, 4, 50e9, 16, 256, 8, 25e9),
        Chip("v5p", 1, 95, 459e12, 1.75e9, 6, 100e9, 4, 6144, 4, 25e9, "megacore"),
        Chip("v6e", 1, 32, 918e12, None, 4, 100e9, 16, 256, 8, 100e9),
        Chip("tpu7x", 2, 192, 2307e12, None, 6, 100e9, 4, 9216, 4, 50e9),
    )
}
# Shapes of slices, smaller size first; in three dimensions also three multiples of 4. v3:2x4 is
# the paper's, of 16 cores (GShard, section 5.3).
_FLAT = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_SMALL_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4"
_SHAPES = {
    "v2": _FLAT,
    "v3": f"{_FLAT} 16x32 32x32",
    "v4": _SMALL_CUBES,
    "v5e": f"1x1 {_FLAT}",
    "v5p": _SMALL_CUBES,
    "v6e": f"1x1 {_FLAT}",
    "tpu7x": f"1x1x1 {_SMALL_CUBES}",
}


class Gpu(NamedTuple):
    """A kind of GPU."""

    name: str
    description: str  # CUDA's name for it
    node: int  # maximum of linked GPUs per node
    device_bytes: int  # memory available to programs under CUDA
    # Peak FLOP/s of dense products. XLA multiplies float32 in TF32 by default.
    bfloat16_flops: float
    tf32_flops: float
    memory_speed: float  # Bytes a second
    highest_hz: float  # the highest clock
    # Bytes per second in one direction and per GPU, to GPUs of its node and to other nodes.
    nvlink_bytes: float
    network_bytes: float
    # Sizes of the GPU.
    multiprocessors: int
    l2_bytes: int

    platform, device_name, cores = "cuda", "GPU", 1
    clock_hz = None  # XLA estimates no cycles for GPUs

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak FLOP/s of products of this type."""
        return self.bfloat16_flops if dtype == "bfloat16" else self.tf32_flops

    @property
    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` as text, which stands for the device.

        It has constants of compute capability 9.0, and the numbers in which GPUs differ.
        """
        return f"""
            platform_name: "CUDA" device_description_str: "{self.description}"
            dnn_version_info {{ major: 9 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: 9 minor: 0 }} threads_per_warp: 32
              threads_per_block_limit: 1024 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
              shared_memory_per_core: 233472 fpus_per_core: 128
              core_count: {self.multiprocessors} l2_cache_size: {self.l2_bytes}
              clock_rate_ghz: {self.highest_hz / 1e9} memory_bandwidth: {int(self.memory_speed)}
              device_memory_size: {self.device_bytes}
            }}
        """


_H100 = Gpu(
    *("h100", "NVIDIA H100 80GB HBM3", 8, int(79.1 * GIB)),
    *(989e12, 495e12, 3.35e12, 1.98e9, 450e9, 50e9, 132, 50 * 2**20),
)
_H200 = _H100._replace(
    name="h200", description="NVIDIA H200", device_bytes=int(139.8 * GIB), memory_speed=4.8e12
)
GPUS = {gpu.name: gpu for gpu in (_H100, _H200)}


@dataclass(frozen=True)
class Machine:
    """TPUs in a grid or torus, or nodes of GPUs.

    v3:32x32 is 1,024 chips and 2,048 devices; 2*v5e:16x16 two such slices, which the data center's
    network links. h100:16x8 is 16 nodes of 8 GPUs, 128 devices.
    """

    chip: Chip | Gpu
    sizes: tuple[int, ...]  # chips along each dimension of a slice, or nodes and GPUs per node
    slices: int = 1

    @property
    def name(self) -> str:
        return f"{self.slices}*{self.slice_name}" if self.slices > 1 else self.slice_name

    @property
    def slice_name(self) -> str:
        """Name of one slice in libtpu."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.sizes)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.cores


def topology(name: str) -> Machine:
    """Returns the machine of that name. Raises InputError if there is none."""
    found = re.fullmatch(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)+)", name)
    if found is None or found[2] not in {**CHIPS, **GPUS}:
        raise InputError(
            f"--topology={name}: a chip and its grid, such as v3:8x8 or v4:4x4x4, slices in front "
            "(2*v5e:16x16), or a GPU, nodes and GPUs a node, such as h100:16x8; chips: "
            f"{', '.join(CHIPS)}; GPUs: {', '.join(GPUS)}"
        )
    slices, kind, grid = int(found[1] or 1), found[2], found[3]
    sizes = tuple(map(int, grid.split("x")))
    if (gpu := GPUS.get(kind)) is not None:
        if slices != 1 or len(sizes) != 2 or 0 in sizes or sizes[1] > gpu.node:
            raise InputError(
                f"--topology={name}: nodes and GPUs a node, two sizes; of {kind} a node has 1 to "
                f"{gpu.node}; GPUs have no slices"
            )
        return Machine(gpu, sizes)
    chip, deep = CHIPS[kind], len(sizes) == 3 == CHIPS[kind].links // 2
    multiples = deep and all(n and n % 4 == 0 for n in sizes) and list(sizes) == sorted(sizes)
    if math.prod(sizes) > chip.most or not (grid in _SHAPES[kind].split() or multiples):
        more = ", or three multiples of 4 in ascending order, such as 4x4x8"
        raise InputError(
            f"--topology={name}: a slice of {kind} has at most {chip.most:,} chips, in a grid of "
            f"{', '.join(_SHAPES[kind].split())}{more if chip.links == 6 else ''}; more chips are "
            f"several slices, 2*{kind}:..., of v4 and later"
        )
    if slices == 0 or (slices > 1 and not chip.host_network_bytes):
        raise InputError(f"--topology={name}: only slices of v4 and later can be joined, 2 or more")
    return Machine(chip, sizes, slices)

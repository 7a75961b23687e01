"""The machines to plan for: what a chip has, and how chips are linked.

TPUs are here, in grids; clusters of GPUs are in `m4.plan.clusters`.

Sources: v2, v3: Jouppi et al. 2020 (CACM 63.7) and, for the links of v3 and v4, Jouppi et al. 2023
(arXiv 2304.01433, table 4); v4 to tpu7x: docs.cloud.google.com/tpu/docs, a page each, at the end of
2025. A link's speed is that of one direction: a quarter or a sixth of half of what those pages call
bidirectional bandwidth. Clocks of v5e and v5p follow from peak and number of multipliers (128 x 128
a unit); for v6e and tpu7x they are not published. The network between slices: the same pages, v5e
and v6e by host (2 x 100 and 4 x 200 Gb/s), v5p and tpu7x by chip (50 and 100 Gb/s); v4: 25 GB/s a
host (Austin et al. 2025, "How to Scale Your Model", part 2). Slices of v2 and v3 cannot be joined
(Cloud TPU Multislice is for v4 and later).
"""

import math
import re
from dataclasses import dataclass

from m4.plan.clusters import GIB, GPUS, Cluster
from m4.settings import InputError


@dataclass(frozen=True)
class Chip:
    """One kind of TPU.

    Attributes:
        cores: JAX devices a chip. gib: memory a chip. peak_flops: bfloat16, a chip, a second.
        clock_hz: of a core; None: not published.
        links: to neighbours, a chip: two a dimension of the torus.
        link_bytes: a second, one link, one direction.
        full: chips along a dimension that make it a ring (a torus, not a grid).
        most: chips of the largest slice.
        host_chips: chips of a host, which share its network adapters.
        host_network_bytes: to other slices, a host, a second; 0: slices cannot be joined.
        core_setting: libtpu's name for a chip whose cores are one device; "": each core is one.
    """

    name: str
    cores: int
    gib: float
    peak_flops: float
    clock_hz: float | None
    links: int
    link_bytes: float
    full: int
    most: int
    host_chips: int
    host_network_bytes: float
    core_setting: str = ""

    @property
    def device_bytes(self) -> int:
        """The memory of a JAX device; programs can use a little less."""
        return int(self.gib * GIB / self.cores)

    @property
    def device_name(self) -> str:
        """What a JAX device is: a core, or where two cores are one device a "device"."""
        return "device" if self.core_setting else "core"

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak of matrix products, operations a second; of any type: TPUs round to bfloat16."""
        del dtype
        return self.peak_flops / self.cores


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


@dataclass(frozen=True)
class Topology:
    """TPUs in a grid or torus: v3:32x32 is 1,024 chips and 2,048 devices. Several such slices are
    linked by the data center's network."""

    chip: Chip
    sizes: tuple[int, ...]
    slices: int = 1

    platform = "tpu"

    @property
    def name(self) -> str:
        slices = f"{self.slices}*" if self.slices > 1 else ""
        return f"{slices}{self.slice_name}"

    @property
    def slice_name(self) -> str:
        """Of one slice, as libtpu calls it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.sizes)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.cores

    @property
    def slice_devices(self) -> int:
        return self.devices // self.slices

    @property
    def device_bytes(self) -> int:
        return self.chip.device_bytes

    @property
    def network_bytes(self) -> float:
        """To other slices, a second, of one device: a host's adapters serve all of its devices."""
        return self.chip.host_network_bytes / self.chip.host_chips / self.chip.cores


Machine = Topology | Cluster


def topology(name: str) -> Machine:
    """The machine of that name.

    Raises:
        ValueError: unknown; the message has the allowed names.
    """
    found = re.fullmatch(r"(?:(\d+)\*)?(\w+):(\d+(?:x\d+)+)", name)
    if found is None or found[2] not in {**CHIPS, **GPUS}:
        raise InputError(
            f"--topology={name}: a chip and its grid, such as v3:8x8 or v4:4x4x4, slices in front "
            "(2*v5e:16x16), or a GPU, nodes and GPUs a node, such as h100:16x8; chips: "
            f"{', '.join(CHIPS)}; GPUs: {', '.join(GPUS)}"
        )
    slices = 1 if found[1] is None else int(found[1])
    sizes = tuple(int(size) for size in found[3].split("x"))
    machine = _cluster if found[2] in GPUS else _slices
    return machine(f"--topology={name}", found[2], sizes, slices)


def _cluster(argument: str, name: str, sizes: tuple[int, ...], slices: int) -> Cluster:
    gpu = GPUS[name]
    if slices != 1 or len(sizes) != 2 or 0 in sizes or sizes[1] > gpu.node:
        raise InputError(
            f"{argument}: nodes and GPUs a node, two sizes; of {gpu.name} a node has 1 to "
            f"{gpu.node}; GPUs have no slices"
        )
    return Cluster(gpu, *sizes)


def _slices(argument: str, name: str, sizes: tuple[int, ...], slices: int) -> Topology:
    chip = CHIPS[name]
    if len(sizes) != chip.links // 2 or 0 in sizes or slices == 0:
        raise InputError(
            f"{argument}: a grid of {name} has {chip.links // 2} sizes of at least 1, and there is "
            "at least one slice"
        )
    if math.prod(sizes) > chip.most:
        several = (
            f"; more chips are several slices, 2*{name}:..." if chip.host_network_bytes else ""
        )
        raise InputError(f"{argument}: a slice of {name} has at most {chip.most:,} chips{several}")
    shapes = _SHAPES[name].split()
    multiples = len(sizes) == 3 and all(n % 4 == 0 for n in sizes) and list(sizes) == sorted(sizes)
    if "x".join(map(str, sizes)) not in shapes and not multiples:
        more = ", and three multiples of 4 in ascending order, such as 4x4x8"
        raise InputError(
            f"{argument}: no slice has this shape; {name} has {', '.join(shapes)}"
            f"{more if len(sizes) == 3 else ''}"
        )
    if slices > 1 and not chip.host_network_bytes:
        raise InputError(
            f"{argument}: slices of {name} cannot be joined, those of v4 and later can"
        )
    return Topology(chip, sizes, slices)

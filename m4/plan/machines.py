"""The machines to plan for: what a chip has, and how chips are linked.

TPUs are here, in grids; clusters of GPUs are in `m4.plan.clusters`.

Sources: v2, v3: Jouppi et al. 2020 (CACM 63.7) and, for the links of v3 and v4, Jouppi et al. 2023
(arXiv 2304.01433, table 4); v4 to tpu7x: docs.cloud.google.com/tpu/docs, a page each, at the end of
2025. A link's speed is that of one direction: a quarter or a sixth of half of what those pages call
bidirectional bandwidth. Clocks of v5e and v5p follow from peak and number of multipliers (128 x 128
a unit); for v6e and tpu7x they are not published, so there is no time model for them.
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
    core_setting: str = ""

    @property
    def device_bytes(self) -> int:
        """The memory of a JAX device; programs can use a little less."""
        return int(self.gib * GIB / self.cores)

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """Peak of matrix products, operations a second; of any type: TPUs round to bfloat16."""
        del dtype
        return self.peak_flops / self.cores


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", 2, 16, 46e12, 0.70e9, 4, 62e9, 16),
        Chip("v3", 2, 32, 123e12, 0.94e9, 4, 70e9, 32),
        Chip("v4", 1, 32, 275e12, 1.05e9, 6, 50e9, 4, "megacore"),
        Chip("v5e", 1, 16, 197e12, 1.50e9, 4, 50e9, 16),
        Chip("v5p", 1, 95, 459e12, 1.75e9, 6, 100e9, 4, "megacore"),
        Chip("v6e", 1, 32, 918e12, None, 4, 100e9, 16),
        Chip("tpu7x", 2, 192, 2307e12, None, 6, 100e9, 4),
    )
}


@dataclass(frozen=True)
class Topology:
    """TPUs in a grid or torus: v3:32x32 is 1,024 chips and 2,048 devices."""

    chip: Chip
    sizes: tuple[int, ...]

    platform = "tpu"

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"

    @property
    def chips(self) -> int:
        return math.prod(self.sizes)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.cores

    @property
    def device_bytes(self) -> int:
        return self.chip.device_bytes

    @property
    def is_torus(self) -> bool:
        """Whether the longest dimension is a ring."""
        return max(self.sizes) >= self.chip.full


Machine = Topology | Cluster


def topology(name: str) -> Machine:
    """The machine of that name.

    Raises:
        ValueError: unknown; the message has the allowed names.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if found is None or found[1] not in {**CHIPS, **GPUS}:
        raise InputError(
            f"--topology={name}: a chip and its grid, such as v3:8x8 or v4:4x4x4, or a GPU, nodes "
            f"and GPUs a node, such as h100:16x8; chips: {', '.join(CHIPS)}; GPUs: "
            f"{', '.join(GPUS)}"
        )
    sizes = tuple(int(size) for size in found[2].split("x"))
    if found[1] in GPUS:
        gpu = GPUS[found[1]]
        if len(sizes) != 2 or 0 in sizes or sizes[1] > gpu.node:
            raise InputError(
                f"--topology={name}: nodes and GPUs a node, two sizes; of {gpu.name} a node has 1 "
                f"to {gpu.node}"
            )
        return Cluster(gpu, *sizes)
    chip = CHIPS[found[1]]
    if len(sizes) != chip.links // 2 or 0 in sizes:
        raise InputError(
            f"--topology={name}: a grid of {chip.name} has {chip.links // 2} sizes of at least 1"
        )
    return Topology(chip, sizes)

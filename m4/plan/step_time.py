"""A model of a step's time: arithmetic on a compiled program. Nothing is measured.

Compute on a TPU: the compiler's estimate of cycles, loops multiplied out, at the chip's clock, and
the products in kernels at the peak. Where the clock is not published, and on a GPU, for which XLA
estimates no cycles: the executed FLOPs at the peak, which no program reaches. Communication: each
collective's bytes over the slowest links that it needs, without overlap; at the links' stated
speed, except for the all-to-all, whose speed is fitted to the GShard paper's measurements.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from m4.plan.hlo import Collective
from m4.plan.machines import Cluster, Machine, Topology

# Name of a kind of collectives between slices.
BETWEEN = "{} between slices"
# Share of a torus's bisection, and seconds a message: fitted to GShard (arXiv 2006.16668), section
# 5.2. There the exchange of MoE and Transformer layers takes 16% of their time on 128 cores, and
# 3.75 times as long on 2,048. Ours of 36 layers at 2,048 tokens a core compute 0.765 s a step on
# 128 cores and exchange 8 MiB a core 108 times: 1.35 ms each, 5.06 ms on 2,048. Then   0.4793 ms /
# share + 127 messages = 1.3487 ms,    0.9587 ms / share + 2047 messages = 5.0575 ms. Not fitted:
# from 16 to 2,048 cores it makes an exchange of 8 MiB 8.3 times as long; the paper measured 9
# (section 5.3). On other TPUs both are an assumption.
EXCHANGE_SHARE, MESSAGE_SECONDS = 0.4057, 1.316e-6


class StepTime(NamedTuple):
    """Seconds of one step, by the model."""

    compute: float | None  # None where it is unknown
    # Seconds of each kind of collectives; those between slices have a separate name (`BETWEEN`).
    by_kind: dict[str, float]

    @property
    def total(self) -> float | None:
        return None if self.compute is None else self.compute + sum(self.by_kind.values())


def step_time(
    cycles: int,
    flops: float,
    dtype: str,
    found: Iterable[Collective],
    machine: Machine,
    *,
    kernels: float = 0.0,
) -> StepTime:
    """Returns the model's time of one step; `kernels` are operations without estimated cycles."""
    by_kind: dict[str, float] = {}
    for each in found:
        seconds = each.times * seconds_of(each, machine)
        kind = each.kind if each.slices == 1 else BETWEEN.format(each.kind)
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    clock = machine.clock_hz
    peak = machine.chip.device_flops(dtype)
    if clock is not None:
        return StepTime(cycles / clock + kernels / peak if cycles else None, by_kind)
    return StepTime(flops / peak if flops else None, by_kind)


def seconds_of(each: Collective, machine: Machine) -> float:
    """Returns the seconds of one run of a collective."""
    if isinstance(machine, Cluster):
        return _cluster_seconds(each, machine)
    if each.slices > 1:
        return each.sent_bytes / machine.network_bytes
    chip, devices = machine.chip, len(each.groups[0])
    if each.kind in ("collective-permute", "collective-broadcast"):
        return each.operand_bytes / chip.link_bytes  # to a neighbour, over one link
    if devices == 1:
        return 0.0
    if each.kind in ("all-to-all", "ragged-all-to-all"):
        fastest = bisection_seconds(each.operand_bytes, devices, machine)
        return fastest / EXCHANGE_SHARE + (devices - 1) * MESSAGE_SECONDS
    # Rings along all dimensions in both directions keep every link of a chip busy. The cores of a
    # chip reduce among themselves first, over memory.
    speed = chip.links * chip.link_bytes
    if each.kind == "all-reduce":
        return 2 * each.operand_bytes / speed
    return each.payload_bytes / speed  # all-gather, reduce-scatter: half of it


def bisection_seconds(payload_bytes: float, devices: int, machine: Topology) -> float:
    """Returns the least seconds of an exchange: O(√D) for D devices.

    Each device has `payload_bytes`, evenly for all of `devices` of a slice.

    Half of the devices send half of theirs to the other half: devices * payload / 4 cross the
    middle of the longest side, in one direction. There the links are chips / side, twice that in a
    ring: devices * payload / 4 / (2 * chips / side * speed). With c cores a chip and
    a torus of side X that is c * X * payload / (8 * speed): O(√D) on a square (GShard, section 5.3;
    its figure 9). A group of some of the devices counts as a square (or cube) of chips,
    a torus only where it spans a whole side.
    """
    chip = machine.chip
    chips = max(1, devices // chip.cores)
    if chips == 1:
        return 0.0
    if devices == machine.slice_devices:
        side: float = max(machine.sizes)
    else:
        side = chips ** (1 / len(machine.sizes))
    both = 2 if side >= chip.full else 1
    crossing = devices * payload_bytes / 4
    return crossing / (both * math.ceil(chips / side) * chip.link_bytes)


def _cluster_seconds(each: Collective, machine: Cluster) -> float:
    """Returns the seconds of one run of a collective between GPUs, counted node by node.

    Within a node everything goes over NVLink at its speed. Between nodes every GPU has its own
    adapter: an all-to-all sends through it what is for other nodes; a ring is as fast as the
    adapters of all GPUs that a node has in it, but no faster than NVLink.
    """
    gpu = machine.chip
    if each.kind in ("collective-permute", "collective-broadcast"):
        apart = any(a // machine.gpus != b // machine.gpus for a, b in each.groups)
        return each.operand_bytes / (gpu.network_bytes if apart else gpu.nvlink_bytes)
    group = each.groups[0]
    nodes = len({device // machine.gpus for device in group})
    together = len(group) / nodes  # GPUs of one node
    if each.kind in ("all-to-all", "ragged-all-to-all"):
        beyond = each.operand_bytes * (1 - together / len(group)) / gpu.network_bytes
        within = each.operand_bytes * (together - 1) / len(group) / gpu.nvlink_bytes
        return max(beyond, within)  # both at once, over different links
    speed = gpu.nvlink_bytes if nodes == 1 else min(gpu.nvlink_bytes, together * gpu.network_bytes)
    return each.sent_bytes / speed

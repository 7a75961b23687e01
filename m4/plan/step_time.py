"""A MODEL of a step's time: arithmetic on a compiled program. Nothing is measured.

Compute on a TPU: the compiler's estimate of cycles, loops multiplied out, at the chip's clock,
without custom kernels. On a GPU, for which XLA estimates none: the executed FLOPs at the peak,
which no program reaches. Communication: each collective's bytes over the slowest links that it
needs, at their stated speed, without latency or overlap.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from m4.plan.clusters import Cluster
from m4.plan.hlo.collectives import Collective
from m4.plan.machines import Machine, Topology


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by the model; compute None: the chip's clock is not published."""

    compute: float | None
    by_kind: dict[str, float]

    @property
    def communication(self) -> float:
        return sum(self.by_kind.values())

    @property
    def total(self) -> float | None:
        return None if self.compute is None else self.compute + self.communication


def step_time(
    cycles: int, flops: float, dtype: str, found: Iterable[Collective], machine: Machine
) -> StepTime:
    """The model of a step.

    Args:
        cycles: by the TPU compiler. flops: executed on a device; dtype: of activations.
        found: the program's collectives.
    """
    by_kind: dict[str, float] = {}
    for each in found:
        seconds = each.times * seconds_of(each, machine)
        by_kind[each.kind] = by_kind.get(each.kind, 0.0) + seconds
    if isinstance(machine, Cluster):
        return StepTime(flops / machine.chip.device_flops(dtype) if flops else None, by_kind)
    clock = machine.chip.clock_hz
    return StepTime(cycles / clock if clock and cycles else None, by_kind)


def seconds_of(each: Collective, machine: Machine) -> float:
    """One run of a collective."""
    if isinstance(machine, Cluster):
        return _cluster_seconds(each, machine)
    chip, devices = machine.chip, len(each.groups[0])
    if each.kind in ("collective-permute", "collective-broadcast"):
        return each.operand_bytes / chip.link_bytes  # to a neighbour, over one link
    if devices == 1:
        return 0.0
    if each.kind in ("all-to-all", "ragged-all-to-all"):
        return all_to_all_seconds(each.operand_bytes, devices, machine)
    # Rings along all dimensions in both directions keep every link of a chip busy. The cores of a
    # chip reduce among themselves first, over memory.
    speed = chip.links * chip.link_bytes
    if each.kind == "all-reduce":
        return 2 * each.operand_bytes / speed
    return each.payload_bytes / speed  # all-gather, reduce-scatter: half of it


def all_to_all_seconds(payload_bytes: float, devices: int, machine: Topology) -> float:
    """An exchange in which each device has `payload_bytes` for all of `devices`, evenly: O(√D).

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
    if devices == machine.devices:
        side: float = max(machine.sizes)
    else:
        side = chips ** (1 / len(machine.sizes))
    both = 2 if side >= chip.full else 1
    crossing = devices * payload_bytes / 4
    return crossing / (both * math.ceil(chips / side) * chip.link_bytes)


def _cluster_seconds(each: Collective, machine: Cluster) -> float:
    """One run of a collective between GPUs: devices are counted node by node.

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
        return max(beyond, within)  # at the same time, over different links
    speed = gpu.nvlink_bytes if nodes == 1 else min(gpu.nvlink_bytes, together * gpu.network_bytes)
    return each.sent_bytes / speed

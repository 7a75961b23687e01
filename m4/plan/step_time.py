"""A MODEL of the time of a step: arithmetic on a compiled program. Nothing here was measured.

Compute: the TPU compiler's own estimate of cycles, loops multiplied out, at the chip's clock; it
leaves out kernels written by others. Communication: what each collective must move over the links
of the slowest part of a torus, at their stated speed, no latency, nothing overlapped.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from m4.core.collectives import Collective
from m4.plan.machines import Topology


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by the model; compute None: the chip's clock is not known."""

    compute: float | None
    by_kind: dict[str, float]

    @property
    def communication(self) -> float:
        return sum(self.by_kind.values())

    @property
    def total(self) -> float | None:
        return None if self.compute is None else self.compute + self.communication


def step_time(cycles: int, found: Iterable[Collective], machine: Topology) -> StepTime:
    """The model, of a program's cycles and collectives on a machine."""
    by_kind: dict[str, float] = {}
    for each in found:
        seconds = each.times * seconds_of(each, machine)
        by_kind[each.kind] = by_kind.get(each.kind, 0.0) + seconds
    clock = machine.chip.clock_hz
    return StepTime(cycles / clock if clock and cycles else None, by_kind)


def seconds_of(each: Collective, machine: Topology) -> float:
    """One run of a collective."""
    chip, devices = machine.chip, len(each.groups[0])
    if each.kind in ("collective-permute", "collective-broadcast"):
        return each.operand_bytes / chip.link_bytes  # to a neighbour, over one link
    if devices == 1:
        return 0.0
    if each.kind in ("all-to-all", "ragged-all-to-all"):
        return all_to_all_seconds(each.operand_bytes, devices, machine)
    # Rings along all dimensions in both directions: every link of a chip works all the time. The
    # cores of a chip first do it among themselves, over memory.
    speed = chip.links * chip.link_bytes
    if each.kind == "all-reduce":
        return 2 * each.operand_bytes / speed
    return each.payload_bytes / speed  # all-gather, reduce-scatter: half of it


def all_to_all_seconds(payload_bytes: float, devices: int, machine: Topology) -> float:
    """An exchange in which each device has `payload_bytes` for all of `devices`, evenly: O(√D).

    Half of the devices send half of theirs to the other half: devices * payload / 4 cross the
    middle of the longest side, in one direction. There the links are chips / side, twice that where
    the ends are joined: devices * payload / 4 / (2 * chips / side * speed). With c cores a chip and
    a torus of side X that is c * X * payload / (8 * speed): O(√D) on a square (GShard, section 5.3;
    its figure 9). Of a part of the devices it is taken that they are a square (or cube) of chips,
    which is a torus only where it is a whole side.
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

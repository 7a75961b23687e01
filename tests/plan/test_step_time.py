"""The model of a step's time: against a simulated torus, and the paper's laws."""

import dataclasses
import itertools
from collections import defaultdict

import pytest

from m4.plan.hlo.collectives import Collective
from m4.plan.machines import CHIPS, Topology, topology
from m4.plan.step_time import all_to_all_seconds, seconds_of, step_time


def collective(kind: str, operand: int, devices: int, times: int = 1, result: int | None = None):
    result = operand if result is None else result
    groups = (tuple(range(devices)),)
    return Collective(kind, "x", "main", operand, result, groups, times, False, "")


def busiest_link(machine: Topology, payload: float) -> float:
    """Bytes over the busiest link when every device sends its payload to all, evenly, along one
    dimension after the other the shortest way; both ways where they are equally long."""
    loads: dict[tuple, float] = defaultdict(float)
    chips = list(itertools.product(*map(range, machine.sizes)))
    each = payload / machine.devices * machine.chip.cores**2  # between two chips
    for source, target in itertools.product(chips, chips):
        at = list(source)
        for axis, size in enumerate(machine.sizes):
            forward = (target[axis] - at[axis]) % size
            ways = [(1, forward)] if 2 * forward < size else [(-1, size - forward)]
            if 2 * forward == size:
                ways = [(1, forward), (-1, forward)]
            if not machine.is_torus:
                ways = [(1 if target[axis] > at[axis] else -1, abs(target[axis] - at[axis]))]
            for step, hops in ways:
                place = list(at)
                for _ in range(hops):
                    loads[tuple(place), axis, step] += each / len(ways)
                    place[axis] = (place[axis] + step) % size
            at[axis] = target[axis]
    return max(loads.values())


@pytest.mark.parametrize(
    ("sizes", "full"), [((4, 4), 4), ((4, 4), 8), ((8, 4), 4), ((8, 2), 16), ((4, 4, 2), 4)]
)
def test_all_to_all_takes_as_long_as_its_busiest_link(sizes: tuple[int, ...], full: int) -> None:
    chip = dataclasses.replace(CHIPS["v3"], full=full, links=2 * len(sizes))
    machine = Topology(chip, sizes)
    seconds = busiest_link(machine, 1e6) / chip.link_bytes
    assert all_to_all_seconds(1e6, machine.devices, machine) == pytest.approx(seconds)


def test_all_to_all_time_grows_with_the_square_root_of_devices() -> None:
    # GShard, section 5.3. c * X * payload / (8 * speed): 2 * 32 * 2^28 / (8 * 70e9) = 30.7 ms.
    full = Topology(CHIPS["v3"], (32, 32))
    assert all_to_all_seconds(2**28, 2048, full) == pytest.approx(2 * 32 * 2**28 / 8 / 70e9)
    torus = dataclasses.replace(CHIPS["v3"], full=1)
    times = [
        all_to_all_seconds(2**28, 2 * side**2, Topology(torus, (side, side)))
        for side in (4, 8, 16, 32)
    ]
    for small, large in itertools.pairwise(times):
        assert large / small == pytest.approx(2)  # four times the devices


def test_all_reduce_time_does_not_depend_on_devices() -> None:
    times = {
        seconds_of(collective("all-reduce", 2**30, machine.devices), machine)
        for machine in map(topology, ("v3:4x4", "v3:8x8", "v3:32x32"))
    }
    # 2 * 2^30 bytes over four links of 70 GB/s.
    assert times == {2 * 2**30 / 280e9}


def test_all_gather_and_reduce_scatter_take_half_of_an_all_reduce() -> None:
    machine = topology("v3:8x8")
    whole = seconds_of(collective("all-reduce", 128 * 2**20, 128), machine)
    gather = collective("all-gather", 2**20, 128, result=128 * 2**20)
    scatter = collective("reduce-scatter", 128 * 2**20, 128, result=2**20)
    assert seconds_of(gather, machine) == seconds_of(scatter, machine) == whole / 2


def test_step_time_is_cycles_plus_collectives() -> None:
    machine = topology("v3:8x8")
    permute = collective("collective-permute", 7_000_000, 2, times=10)
    alone = dataclasses.replace(collective("all-reduce", 2**30, 1))
    found = step_time(940_000_000, 1e12, "float32", [permute, alone], machine)
    assert found.compute == pytest.approx(1.0)  # 0.94 GHz
    # Ten times 7 MB at 70 GB/s are 1 ms; one device exchanges with no other.
    assert found.by_kind == pytest.approx({"collective-permute": 0.001, "all-reduce": 0.0})
    assert found.total == pytest.approx(1.001)


def test_unpublished_clock_gives_no_step_time() -> None:
    found = step_time(
        10**9, 1e12, "float32", [collective("all-reduce", 2**30, 64)], topology("v6e:8x8")
    )
    assert found.compute is None
    assert found.total is None
    assert found.communication > 0

"""Topologies: what they have, and what is refused."""

import pytest

from m4.plan.machines import CHIPS, GIB, Topology, topology


def test_the_papers_machine() -> None:
    machine = topology("v3:32x32")
    assert (machine.chips, machine.devices) == (1024, 2048)  # two cores a chip
    assert machine.device_bytes == 16 * GIB
    assert machine.chip.device_flops() == pytest.approx(61.5e12)
    assert isinstance(machine, Topology)
    assert machine.is_torus
    assert not Topology(CHIPS["v3"], (8, 8)).is_torus
    assert machine.name == "v3:32x32"


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_clock_and_multipliers_give_the_peak(chip) -> None:
    if chip.clock_hz is None:
        pytest.skip("not published")
    # Multipliers of 128 x 128, two operations a clock: 2 * 128 * 128 = 32,768 a unit.
    units = chip.peak_flops / chip.clock_hz / 32_768
    assert units == pytest.approx(round(units), rel=0.01)
    # Two a chip and core of v2 (one each), v3 four, v4 and v5p eight, v5e four.
    assert round(units) == {"v2": 2, "v3": 4, "v4": 8, "v5e": 4, "v5p": 8}[chip.name]


@pytest.mark.parametrize(
    "name", ["v3", "v3:8", "v9:8x8", "v3:8x8x8", "v4:8x8", "v3:0x8", "v3:8x8 ", "", "H100:8x8"]
)
def test_unknown_machine_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"^--topology=") as error:
        topology(name)
    assert "\n" not in str(error.value)

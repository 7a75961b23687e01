"""Topologies: what they have, and what is refused."""

import pytest

from m4.parallel.platform.machines import CHIPS, GIB, topology
from tests.scripts.cloud import SLICES, described


def test_the_papers_machine() -> None:
    machine = topology("v3:32x32")
    assert (machine.chips, machine.devices) == (1024, 2048)  # two cores a chip
    assert machine.chip.device_bytes == 16 * GIB
    assert machine.chip.device_flops() == pytest.approx(61.5e12)
    assert machine.name == "v3:32x32"


def test_slices_multiply_chips() -> None:
    machine = topology("2*v5e:16x16")
    assert (machine.chips, machine.devices) == (512, 512)
    assert (machine.name, machine.slice_name) == ("2*v5e:16x16", "v5e:16x16")
    # 6.4 and 25.6 Tb/s a pod of 256 chips; two devices a chip of tpu7x, which has 100 Gb/s.
    for name, bits in (
        ("v5e:4x4", 6.4e12 / 256),
        ("v6e:4x4", 25.6e12 / 256),
        ("tpu7x:2x2x1", 50e9),
    ):
        assert topology(f"2*{name}").chip.network_bytes == bits / 8


def test_nodes_and_gpus() -> None:
    machine = topology("h100:16x8")
    assert (machine.devices, machine.chips, machine.name) == (128, 128, "h100:16x8")
    # TF32 is half of bfloat16 on tensor cores.
    half, whole = map(machine.chip.device_flops, ("float32", "bfloat16"))
    assert whole / half == pytest.approx(2, rel=0.01)


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
    ("name", "why"),
    [
        *[(name, "") for name in ("v3", "v3:8", "v9:8x8", "v3:8x8 ", "", "H100:8x8", "2*v5e")],
        *[(name, "in a grid of") for name in ("v3:8x8x8", "v4:8x8", "v3:0x8", "v5e:3x3")],
        ("v5e:16x32", "a slice of v5e has at most 256 chips, in a grid of 1x1, 2x2, 2x4, 4x4"),
        ("v3:64x32", "a slice of v3 has at most 1,024 chips"),
        ("v4:3x5x7", "2x2x1, 2x2x2, 2x2x4, 2x4x4, or three multiples of 4 in ascending order"),
        *[(name, "slices of v4 and later can be joined") for name in ("2*v3:8x8", "0*v5e:2x2")],
        *[(name, "GPUs have no slices") for name in ("2*h100:2x8", "h100:16x9", "h100:2x2x2")],
    ],
)
def test_unknown_machine_is_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^--topology=") as error:
        topology(name)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_every_slice_that_the_scripts_know_can_be_planned() -> None:
    for name, (kind, _, chips) in SLICES.items():
        assert topology(f"{kind}:{described()[name]['TOPOLOGY']}").chips == chips, name


def test_slices_between_powers_of_two_can_be_planned() -> None:
    for name, chips in (("v4:4x4x12", 192), ("v5p:16x16x24", 6144), ("tpu7x:16x24x24", 9216)):
        assert topology(name).chips == chips
